"""Cordons as objects of a real API server, and annotations of nodes that become such objects."""

import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from msgspec import structs

from kvrouter.core.cordon_rules import Cordon, CordonSource
from kvrouter.core.errors import CordonsUnavailable
from kvrouter.kube.account import Account
from kvrouter.transports.records.kubernetes import KubernetesCordons
from kvrouter.transports.records.port import CordonStore
from tests.system.cluster.certificates import LOOPBACK
from tests.system.cluster.control_plane import ControlPlane
from tests.system.cluster.namespaces import new_namespace
from tests.system.cluster.operators import graph, install_crds, operator
from tests.system.cluster.workers_store import mounted, user_of
from tests.testing.cordon_laws import ZONE, CordonLaws
from tests.testing.discovery_stores import ignore_reports
from tests.testing.mock_server import words
from tests.testing.processes import Frontend, eventually, fleet

pytestmark = pytest.mark.api_server

VERBS = ("list", "create", "patch", "delete")


@pytest.fixture(scope="module")
def space(plane: ControlPlane) -> Iterator[str]:
    install_crds(plane)
    with new_namespace(plane) as name:
        plane.kubectl("get", "kvrc", "--namespace", name)  # it asks until the storage of a new kind is there
        yield name


def account(plane: ControlPlane, space: str, verbs: tuple[str, ...], folder: Path) -> Account:
    """A service account with these rights on cordons and no others."""
    name = f"cordons-{secrets.token_hex(4)}"
    metadata = {"namespace": space, "name": name}
    rule = {"apiGroups": ["kvrouter.dev"], "resources": ["kvroutercordons"], "verbs": list(verbs)}
    rbac = "rbac.authorization.k8s.io"
    plane.apply(
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata},
        {"apiVersion": f"{rbac}/v1", "kind": "Role", "metadata": metadata, "rules": [rule]},
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "RoleBinding",
            "metadata": metadata,
            "roleRef": {"apiGroup": rbac, "kind": "Role", "name": name},
            "subjects": [{"kind": "ServiceAccount", **metadata}],
        },
    )
    plane.until_granted(user_of(space, name), verbs[-1], "kvroutercordons.kvrouter.dev", space)
    return mounted(plane, space, name, folder)


@pytest.fixture(scope="module")
def anyone(plane: ControlPlane, space: str, tmp_path_factory: pytest.TempPathFactory) -> Account:
    """May do what the page lists for frontends, and nothing more."""
    return account(plane, space, VERBS, tmp_path_factory.mktemp("anyone") / "account")


@pytest.fixture
async def end(anyone: Account) -> AsyncIterator[Callable[[], KubernetesCordons]]:
    made: list[KubernetesCordons] = []
    name = f"test-{secrets.token_hex(4)}"

    def one() -> KubernetesCordons:
        made.append(KubernetesCordons(anyone, namespace=name, on_refused=ignore_reports))
        return made[-1]

    yield one
    for each in made:
        await each.close()


class TestObjects(CordonLaws):
    """As every store, with no more rights than the page lists."""


async def test_cordon_objects_written_by_users_are_read_and_removed(
    plane: ControlPlane, space: str, anyone: Account
) -> None:
    name, refused = f"test_{secrets.token_hex(4)}", list[tuple[str, str]]()
    store: CordonStore = KubernetesCordons(
        anyone, namespace=name, on_refused=lambda *refusal: refused.append(refusal)
    )

    def written(called: str, spec: dict[str, object]) -> dict[str, object]:
        metadata = {"namespace": space, "name": called, "labels": {"kvrouter.dev/namespace": name}}
        kind = {"apiVersion": "kvrouter.dev/v1alpha1", "kind": "KvrouterCordon"}
        return {**kind, "metadata": metadata, "spec": spec}

    plane.apply(written(f"rack-{name[5:]}", {"level": "rack", "name": "r4", "by": "ann"}))
    plane.apply(written(f"bad-{name[5:]}", {"level": "worker", "name": "seven"}))
    for _ in range(2):
        (found,) = await store.read()
        assert structs.replace(found, at_s=0.0) == Cordon("rack", "r4", by="ann")
        assert found.at_s > 1_700_000_000, "as old as its object"
    ((what, why),) = refused
    assert what == f"object bad-{name[5:]} of kvroutercordons.kvrouter.dev"
    assert "a worker's id is a number" in why
    await store.remove(Cordon("rack", "r4"))
    assert await store.read() == ()
    await store.put(ZONE)
    listed = plane.kubectl("get", "kvrc", "--namespace", space)
    assert "maintenance of rack 4" in listed
    assert isinstance(store, KubernetesCordons)
    await store.close()


async def test_a_cordon_write_without_rights_names_the_needed_role(
    plane: ControlPlane, space: str, tmp_path: Path
) -> None:
    store = KubernetesCordons(
        account(plane, space, ("list",), tmp_path / "reader"), namespace="one", on_refused=ignore_reports
    )
    assert await store.read() == ()
    with pytest.raises(CordonsUnavailable, match="bind a Role with list, create, patch and delete"):
        await store.put(ZONE)
    await store.close()


@pytest.mark.api_server(is_enough=False)
async def test_a_node_annotation_cordons_its_workers_until_removed(
    plane: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    install_crds(plane)
    node, other = "zone-a-0", "zone-b-0"
    environ = {
        "DYN_NAMESPACE": f"{namespace}_llm",
        "DYN_DISCOVERY_BACKEND": "kubernetes",
        "DYN_EVENT_PLANE": "zmq",
        "KUBERNETES_SERVICE_HOST": LOOPBACK,
        "KUBERNETES_SERVICE_PORT": str(urlsplit(plane.url).port),
    }
    async with operator(plane, namespace, "one", "--discovery", "kubernetes", "--event-plane", "zmq"):
        plane.apply(graph(namespace, "llm"))
        for name in ("llm-workers", "llm-frontends"):
            await eventually(lambda name=name: has(plane, "serviceaccount", name, namespace))
            await eventually(lambda name=name: has(plane, "rolebinding", name, namespace))
        mine = {
            name: {
                "KVROUTER_KUBERNETES_ACCOUNT": str(mounted(plane, namespace, name, tmp_path / name).folder)
            }
            for name in ("llm-workers", "llm-frontends")
        }
        async with fleet(environ) as processes:
            for worker, place in (("1", node), ("2", other)):
                where = {**mine["llm-workers"], "POD_NODE_NAME": place}
                await processes.worker("--worker-id", worker, environ=where)
            frontend = await processes.frontend(environ=mine["llm-frontends"])
            await eventually(lambda: frontend.serves(2))
            assert await answers_at(frontend, 1)
            plane.kubectl("annotate", "node", node, "kvrouter.dev/cordon=maintenance of rack 4")
            try:
                await eventually(lambda: cordoned(frontend, 1))
                for _ in range(4):
                    assert (await complete(frontend))[1] == "2"
                assert not await answers_at(frontend, 1)
                (listed,) = (await frontend.http.get("/v1/cordons")).json()["cordons"]
                assert (listed["level"], listed["name"], listed["reason"], listed["source"]) == (
                    "node",
                    node,
                    "maintenance of rack 4",
                    CordonSource.NODE_ANNOTATION.value,
                )
                assert listed["at"] is not None
                gone = await frontend.http.delete("/v1/cordons", params={"level": "node", "name": node})
                assert (gone.status_code, gone.json()["error"]["code"]) == (409, "cordoned_elsewhere")
                where = {**mine["llm-workers"], "POD_NODE_NAME": node}
                await processes.worker("--worker-id", "3", environ=where)
                await eventually(lambda: frontend.serves(3))
                assert await cordoned(frontend, 3), "a worker that comes to the node is cordoned, too"
                by_call = {"level": "node", "name": other, "force": True}
                assert (await frontend.http.post("/v1/cordons", json=by_call)).status_code == 200
            finally:
                plane.kubectl("annotate", "node", node, "kvrouter.dev/cordon-")
            await eventually(lambda: answers_at(frontend, 1))
            await eventually(lambda: answers_at(frontend, 3))
            assert await cordoned(frontend, 2), "what a call made is not the operator's to remove"
    (left,) = plane.read("kvrc", "--namespace", namespace)["items"]
    assert left["spec"]["name"] == other


async def has(plane: ControlPlane, kind: str, name: str, namespace: str) -> bool:
    found = plane.read(kind, "--namespace", namespace)["items"]
    return name in {each["metadata"]["name"] for each in found}


async def complete(frontend: Frontend, **more: object) -> tuple[int, str]:
    body = {"model": "mock", "prompt": words(n=40), "max_tokens": 1, **more}
    answer = await frontend.http.post("/v1/completions", json=body)
    return answer.status_code, answer.headers.get("x-kvrouter-decode-worker", "")


async def answers_at(frontend: Frontend, worker: int) -> bool:
    """Whether a request that is pinned to a worker is served."""
    return (await complete(frontend, nvext={"backend_instance_id": worker}))[0] == 200


async def cordoned(frontend: Frontend, worker: int) -> bool:
    workers = (await frontend.fleet())["workers"]
    return any(each["cordons"] for each in workers if each["worker_id"] == worker)

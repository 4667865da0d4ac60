"""Discovery by a real API server keeps the laws of every discovery, and those of its own."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.core.workers import WorkerCard
from kvrouter.kube.account import Account
from kvrouter.kube.client import RequestRefused
from kvrouter.transports.records.kubernetes import OwnerPod
from kvrouter.transports.records.kubernetes.cards import WorkerObjects
from kvrouter.transports.records.port import Gone
from tests.system.cluster.certificates import LOOPBACK
from tests.system.cluster.control_plane import ControlPlane
from tests.system.cluster.namespaces import new_namespace
from tests.system.cluster.pods import BY_HAND, pod
from tests.system.cluster.workers_store import (
    FRONTEND_VERBS,
    WORKER_VERBS,
    KubernetesStore,
    account,
    install_definition,
    kubernetes_store,
)
from tests.testing.discovery_laws import OLD, ONE, CardLaws, LeaseLaws
from tests.testing.discovery_stores import card, ignore_reports, record_discovery
from tests.testing.mock_server import words
from tests.testing.processes import eventually, fleet
from tests.testing.waits import until

pytestmark = pytest.mark.api_server


@pytest.fixture(scope="module")
def space(plane: ControlPlane) -> Iterator[str]:
    """A namespace of Kubernetes, where the kind is known; every test has a fleet of its own in it."""
    install_definition(plane)
    with new_namespace(plane) as name:
        yield name


@pytest.fixture(scope="module")
def anyone(plane: ControlPlane, space: str, tmp_path_factory: pytest.TempPathFactory) -> Account:
    """May do what workers and frontends do."""
    folder = tmp_path_factory.mktemp("anyone") / "account"
    return account(plane, space, "anyone", (*WORKER_VERBS, *FRONTEND_VERBS), folder)


@pytest.fixture
async def store(plane: ControlPlane, anyone: Account) -> AsyncIterator[KubernetesStore]:
    async with kubernetes_store(plane, anyone) as made:
        yield made


class TestCards(CardLaws):
    """As every store."""


class TestLeases(LeaseLaws):
    """As every store."""


async def test_workers_and_frontends_need_no_more_rights_than_the_page_lists(
    plane: ControlPlane, space: str, store: KubernetesStore, tmp_path: Path
) -> None:
    worker = store.end(account=account(plane, space, "worker", WORKER_VERBS, tmp_path / "worker"))
    frontend = store.end(account=account(plane, space, "frontend", FRONTEND_VERBS, tmp_path / "frontend"))
    recorder = await record_discovery(frontend)
    await worker.publish(card())
    await worker.publish(card(draining=True))
    await worker.withdraw(ONE, OLD)
    await recorder.until_heard(card(), card(draining=True), (1, OLD, Gone.WITHDRAWN))
    assert store.troubles == []
    await frontend.publish(card(2))
    deaf = await record_discovery(worker)
    assert deaf.events == [False]
    ((what, why),) = store.troubles
    assert what == "worker 2"
    assert "cannot create resource" in why
    assert "bind a Role" in why


async def test_exactly_one_of_concurrent_starts_with_one_worker_id_wins(store: KubernetesStore) -> None:
    lost: list[Epoch] = []
    starts = [Epoch(number) for number in range(100, 108)]
    ends = [store.end(on_lost=lambda _id, incarnation, _why: lost.append(incarnation)) for _ in starts]
    recorder = await record_discovery(store.end())
    await asyncio.gather(*(end.publish(card(1, each)) for end, each in zip(ends, starts, strict=True)))
    await until(lambda: len(lost) == len(starts) - 1)
    (winner,) = set(starts) - set(lost)
    late = await record_discovery(store.end())
    assert late.events == [card(1, winner)]
    await ends[starts.index(winner)].publish(card(1, winner, draining=True))
    await recorder.until(lambda: card(1, winner, draining=True) in recorder.events)
    cards = [each for each in recorder.events if isinstance(each, WorkerCard)]
    assert cards[-2:] == [card(1, winner), card(1, winner, draining=True)]


@pytest.mark.api_server(is_enough=False)  # a controller deletes it
async def test_kubernetes_deletes_the_card_of_a_deleted_pod(
    plane: ControlPlane, space: str, store: KubernetesStore
) -> None:
    manifest = pod(space, "worker-7", BY_HAND)
    manifest["spec"]["schedulerName"] = "nobody"
    plane.apply(manifest)
    uid = plane.read("pod", "worker-7", "--namespace", space)["metadata"]["uid"]
    worker = store.end(pod=OwnerPod("worker-7", uid))
    await worker.publish(card(7))
    await worker.publish(card(7, draining=True))
    recorder = await record_discovery(store.end())
    await store.end().withdraw(WorkerId(7), OLD)
    await recorder.until_heard(card(7, draining=True), (7, OLD, Gone.WITHDRAWN))
    await worker.close()
    await store.kubectl("delete", "pod", "worker-7", "--namespace", space, "--force", "--grace-period=0")
    await store.kubectl("wait", "--for=delete", *store.selected, "--timeout=120s")


async def test_a_watch_from_a_too_old_version_is_refused_with_410(
    store: KubernetesStore, anyone: Account
) -> None:
    await store.end().publish(card())
    api = WorkerObjects(anyone, fleet=store.fleet, lease_s=60.0, on_refused=ignore_reports, pod=None)
    try:
        with pytest.raises(RequestRefused) as reported:
            async with api.watch("1") as stream:
                await anext(stream)
    finally:
        await api.close()
    assert reported.value.status == 410


async def test_a_deleted_worker_object_is_written_again_without_a_departure(
    store: KubernetesStore,
) -> None:
    await store.end().publish(card())
    recorder = await record_discovery(store.end())
    await store.kubectl("delete", *store.selected)

    async def is_there_again() -> bool:
        return f"{store.fleet}-1" in await store.kubectl("get", *store.selected, "--output", "name")

    await eventually(is_there_again)
    assert recorder.events == [card()]


async def test_a_broken_connection_is_no_lost_discovery(store: KubernetesStore) -> None:
    worker = store.end()
    await worker.publish(card())
    recorder = await record_discovery(store.end())
    for round_ in range(3):
        store.proxy.cut()
        await worker.publish(card(10 + round_))
        await recorder.until(lambda: card(10 + round_) in recorder.events)  # noqa: B023
    assert [each for each in recorder.events if isinstance(each, bool)] == []
    assert recorder.losses == []


async def test_an_unresponsive_api_server_marks_discovery_lost_until_back(store: KubernetesStore) -> None:
    await store.end().publish(card())
    recorder = await record_discovery(store.end())
    store.proxy.pause()
    await recorder.until_heard(card(), False)
    store.proxy.resume()
    await recorder.until_heard(card(), False, True)


async def test_objects_without_a_card_are_reported_and_a_worker_retakes_its_name(
    plane: ControlPlane, space: str, store: KubernetesStore
) -> None:
    def foreign(name: str, spec: dict[str, object]) -> dict[str, object]:
        labels = {"kvrouter.dev/namespace": store.fleet}
        metadata = {"namespace": space, "name": name, "labels": labels}
        return {
            "apiVersion": "kvrouter.dev/v1alpha1",
            "kind": "KvrouterWorker",
            "metadata": metadata,
            "spec": spec,
        }

    recorder = await record_discovery(store.end())
    plane.apply(foreign("stranger", {"card": {}, "lease_s": 1}))
    plane.apply(foreign(f"{store.fleet}-1", {"card": {"model": "m"}, "lease_s": 1}))
    worker = store.end()
    await worker.publish(card())
    await recorder.until_heard(card())
    later = await record_discovery(store.end())
    assert later.events == [card()]
    assert {what for what, _ in store.refusals} == {"object stranger", f"object {store.fleet}-1"}
    assert len([what for what, _ in store.refusals if what == f"object {store.fleet}-1"]) == 1


async def test_kubectl_lists_workers_in_readable_columns(store: KubernetesStore) -> None:
    await store.end().publish(card())
    table = await store.kubectl("get", *store.selected)
    assert table.splitlines()[0].split() == ["NAME", "FLEET", "MODEL", "ROLE", "ADDRESS", "WITHDRAWN", "AGE"]
    assert table.splitlines()[1].split()[:5] == [f"{store.fleet}-1", store.fleet, "m", "both", "test://1"]


async def test_processes_find_each_other_through_the_api_server(
    plane: ControlPlane, space: str, anyone: Account
) -> None:
    environ = {
        "DYN_DISCOVERY_BACKEND": "kubernetes",
        "DYN_EVENT_PLANE": "zmq",
        "KUBERNETES_SERVICE_HOST": LOOPBACK,
        "KUBERNETES_SERVICE_PORT": str(urlsplit(plane.url).port),
        "KVROUTER_KUBERNETES_ACCOUNT": str(anyone.folder),
        "NATS_SERVER": "nats://127.0.0.1:1",
    }
    async with fleet(environ) as processes:
        worker = await processes.worker("--speedup", "20")
        frontend = await processes.frontend()

        async def is_served() -> bool:
            body = {"model": "mock", "prompt": words(n=200), "max_tokens": 4}
            return (await frontend.http.post("/v1/completions", json=body)).status_code == 200

        await eventually(is_served)
        objects = plane.read("kvw", "--namespace", space)["items"]
        (found,) = [each for each in objects if each["metadata"]["name"].startswith(processes.namespace)]
        assert found["spec"]["lease_s"] == 60
        assert await worker.stop() == 0

        async def nobody_is_left() -> bool:
            return not (await frontend.fleet())["workers"]

        await eventually(nobody_is_left)

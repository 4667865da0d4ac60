"""One frontend for the workers of two clusters, each with an API server of its own: KV crosses none."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import yaml

from kvrouter.kube.account import Account
from tests.system.cluster.certificates import LOOPBACK
from tests.system.cluster.control_plane import ControlPlane
from tests.system.cluster.namespaces import new_namespace
from tests.system.cluster.workers_store import FRONTEND_VERBS, WORKER_VERBS, account, install_definition
from tests.testing.mock_server import words
from tests.testing.processes import Fleet, Frontend, Running, eventually, fleet

EAST, WEST = "east", "west"
FLAGS = ("--kv-transfer-topology-level", "cluster", "--cluster", EAST)


@dataclass(frozen=True)
class Cluster:
    """One cluster: its control plane, and who may announce workers in it."""

    plane: ControlPlane
    space: str
    workers: Account

    @property
    def environ(self) -> dict[str, str]:
        """What a pod of this cluster would find in its environment."""
        return {
            "DYN_DISCOVERY_BACKEND": "kubernetes",
            "KUBERNETES_SERVICE_HOST": LOOPBACK,
            "KUBERNETES_SERVICE_PORT": str(urlsplit(self.plane.url).port),
            "KVROUTER_KUBERNETES_ACCOUNT": str(self.workers.folder),
        }


def cluster(plane: ControlPlane, space: str, folder: Path) -> Cluster:
    install_definition(plane)
    return Cluster(plane, space, account(plane, space, "workers", WORKER_VERBS, folder / "workers"))


@pytest.fixture
def east(plane: ControlPlane, tmp_path: Path) -> Iterator[Cluster]:
    with new_namespace(plane) as space:
        yield cluster(plane, space, tmp_path / EAST)


@pytest.fixture
def west(own_plane: ControlPlane, tmp_path: Path) -> Iterator[Cluster]:
    with new_namespace(own_plane) as space:
        yield cluster(own_plane, space, tmp_path / WEST)


@pytest.fixture
def frontends(east: Cluster, west: Cluster, tmp_path: Path) -> Mapping[str, str]:
    """What a frontend in the eastern cluster needs: an account there, and a kubeconfig for the western one
    with the same rights, whose context names the namespace.
    """
    own = account(east.plane, east.space, "frontends", FRONTEND_VERBS, tmp_path / "own")
    account(west.plane, west.space, "frontends", FRONTEND_VERBS, tmp_path / "other")
    document = yaml.safe_load(west.plane.account_kubeconfig(west.space, "frontends").read_text())
    document["contexts"][0]["context"]["namespace"] = west.space
    kubeconfig = tmp_path / "west.yaml"
    kubeconfig.write_text(yaml.safe_dump(document))
    return {
        **east.environ,
        "KVROUTER_KUBERNETES_ACCOUNT": str(own.folder),
        "KVROUTER_OTHER_CLUSTERS": f"{WEST}={kubeconfig}#test",
    }


@pytest.fixture
async def processes() -> AsyncIterator[Fleet]:
    environ = {"DYN_EVENT_PLANE": "zmq", "NATS_SERVER": "nats://127.0.0.1:1"}
    async with fleet(environ) as made:
        yield made


async def pair(processes: Fleet, there: Cluster) -> tuple[Running, Running]:
    """A prefill and a decode worker of a cluster, which say that they are in the same zone as all others."""
    flags = ("--speedup", "20", "--domain", "zone=a")
    prefill, decode = await asyncio.gather(
        processes.worker("--role", "prefill", *flags, environ=there.environ),
        processes.worker("--role", "decode", *flags, environ=there.environ),
    )
    return prefill, decode


async def in_clusters(frontend: Frontend) -> dict[tuple[str, str], int]:
    """The ids of the workers that a frontend serves, by cluster and role."""
    found = (await frontend.fleet())["workers"]
    return {(each["domains"]["cluster"], each["role"]): each["worker_id"] for each in found}


async def asked(frontend: Frontend, **nvext: Any) -> httpx.Response:
    body = {"model": "mock", "prompt": words(n=200), "max_tokens": 4, "nvext": nvext}
    return await frontend.http.post("/v1/completions", json=body)


async def handoffs(frontend: Frontend) -> set[tuple[str, str]]:
    """From which cluster to which one KV went."""
    return {
        (labels["prefill_domain"], labels["decode_domain"])
        for labels, _ in (await frontend.metrics()).of("handoffs_total")
    }


async def test_a_frontend_serves_two_clusters_and_kv_stays_in_each(
    east: Cluster, west: Cluster, frontends: Mapping[str, str], processes: Fleet
) -> None:
    own, other = await pair(processes, east), await pair(processes, west)
    frontend = await processes.frontend(*FLAGS, environ=frontends)
    await eventually(lambda: frontend.serves(4))
    ids = await in_clusters(frontend)
    assert set(ids) == {(where, role) for where in (EAST, WEST) for role in ("prefill", "decode")}
    assert ids[EAST, "prefill"] == int(own[0].ready["worker"])
    assert ids[WEST, "decode"] == int(other[1].ready["worker"])
    (levels,) = {tuple(each["levels"]) for each in (await frontend.fleet())["workers"]}
    assert levels == ("cluster", "zone")

    for where in (EAST, WEST):
        (await asked(frontend, prefill_worker_id=ids[where, "prefill"])).raise_for_status()
    assert await handoffs(frontend) == {(EAST, EAST), (WEST, WEST)}
    across = {"prefill_worker_id": ids[EAST, "prefill"], "decode_worker_id": ids[WEST, "decode"]}
    refused = await asked(frontend, **across)
    assert "may not leave cluster=east" in refused.json()["error"]["message"]
    assert await own[1].stop() == 0
    await eventually(lambda: frontend.serves(3))
    for _ in range(4):
        (await asked(frontend)).raise_for_status()
    assert (await asked(frontend, prefill_worker_id=ids[EAST, "prefill"])).status_code == 503
    assert await handoffs(frontend) == {(EAST, EAST), (WEST, WEST)}

    west.plane.kill_api_server()
    await eventually(lambda: is_well(frontend, False))
    await frontend.has_logged("discovery_lost")
    await frontend.has_logged("cluster west: ")
    late = await processes.worker("--role", "decode", "--speedup", "20", environ=east.environ)
    await eventually(lambda: frontend.serves(4))
    for where in (EAST, WEST):
        (await asked(frontend, prefill_worker_id=ids[where, "prefill"])).raise_for_status()
    started = await processes.frontend(*FLAGS, environ=frontends)
    await eventually(lambda: started.serves(2))
    (await asked(started)).raise_for_status()
    assert await handoffs(started) == {(EAST, EAST)}

    await asyncio.to_thread(west.plane.bring_back_api_server)
    await eventually(lambda: is_well(frontend, True))
    await eventually(lambda: started.serves(4))
    assert await handoffs(frontend) == {(EAST, EAST), (WEST, WEST)}
    assert (await in_clusters(started))[EAST, "decode"] == int(late.ready["worker"])
    assert "Traceback" not in frontend.lines() + started.lines()


async def is_well(frontend: Frontend, wanted: bool) -> bool:
    """Whether a frontend says, as ``wanted``, that discovery can be reached."""
    return (await frontend.metrics()).total("discovery_up") == float(wanted)

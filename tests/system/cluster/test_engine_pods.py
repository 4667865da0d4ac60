"""``kvrouter up --engine-pods`` on a real API server, with the rights of the example and no more."""

import asyncio
import re
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import httpx
import pytest
from openai import APIStatusError

from kvrouter.app.attach.pod_fleet import worker_id_of
from kvrouter.core.workers import Role
from kvrouter.text.source import MOCK_FOLDER
from tests.system.cluster.certificates import LOOPBACK
from tests.system.cluster.control_plane import ControlPlane
from tests.system.cluster.nodes import ZONES
from tests.system.cluster.pods_with_engines import (
    PodsWithEngines,
    allow_cards,
    completed,
    example,
    pods_with_engines,
    service_account,
    there,
    until_there,
)
from tests.testing.nats_server import NatsServer
from tests.testing.processes import Frontend, eventually, free_ports

NEAR, FAR, _ = ZONES


@pytest.fixture
async def here(plane: ControlPlane, namespace: str, tmp_path: Path) -> AsyncIterator[PodsWithEngines]:
    account = service_account(plane, namespace, tmp_path / "account")
    async with pods_with_engines(plane, account) as made:
        yield made


async def until_reported(here: PodsWithEngines, name: str, reason: str) -> str:
    found: list[str] = []

    async def is_reported() -> bool:
        found[:] = [message for each, message in await here.events(name) if each == reason]
        return bool(found)

    await eventually(is_reported)
    return found[0]


async def refused(frontend: Frontend) -> str:
    with pytest.raises(APIStatusError) as caught:
        await completed(frontend)
    assert caught.value.status_code == 503
    return caught.value.message


async def test_a_labelled_engine_pod_is_served_while_ready_until_deleted(
    here: PodsWithEngines,
) -> None:
    frontend = await here.up()
    await here.pod("one", zone=NEAR)
    worker_id = worker_id_of(await here.uid("one"))

    async def is_seen() -> bool:
        return "the pod is not ready" in (await frontend.http.get("/ready")).text

    await eventually(is_seen)
    assert (await frontend.metrics()).total("engines_awaited") == 1
    await here.set_ready("one")
    await until_there(frontend, 1)
    assert await there(frontend) == [(worker_id, "both", NEAR, False)]
    assert await completed(frontend)

    async def is_routed_by_cache() -> bool:
        (model,) = (await frontend.fleet())["models"]
        return bool(model["routing"] == "cache")

    await eventually(is_routed_by_cache)
    assert await until_reported(here, "one", "EngineJoined") == (
        f"kvrouter serves tiny here, as worker {worker_id} (both)"
    )

    await here.set_ready("one", ready=False)

    async def drains() -> bool:
        return await there(frontend) == [(worker_id, "both", NEAR, True)]

    await eventually(drains)
    await refused(frontend)
    await here.set_ready("one")
    await until_there(frontend, 1)
    assert await completed(frontend)

    again = await here.up()
    await until_there(again, 1)
    assert await there(again) == [(worker_id, "both", NEAR, False)]
    await here.delete("one")
    await until_there(frontend, 0)
    assert "Traceback" not in frontend.lines()
    assert await frontend.stop() == 0


async def test_a_wrong_annotation_is_a_pod_event_and_its_fix_adds_the_engine(
    here: PodsWithEngines,
) -> None:
    frontend = await here.up("--model-path", f"other={MOCK_FOLDER}")
    await here.pod("wrong", zone=NEAR, annotations={"role": "cook"})
    await here.pod("other", zone=NEAR, annotations={"block-size": "64"})
    await here.set_ready("wrong", "other")
    assert await until_reported(here, "wrong", "EngineMistaken") == (
        "annotation kvrouter.dev/role: must be 'prefill', 'decode' or 'both', not 'cook'"
    )
    contradicted = await until_reported(here, "other", "EngineRefused")
    assert "annotation kvrouter.dev/block-size: the engine's blocks have 32 tokens, not 64" in contradicted
    assert await there(frontend) == []
    await here.kubectl("annotate", "pod", "wrong", "--overwrite", "kvrouter.dev/role=both")
    await until_there(frontend, 1)
    await here.kubectl("annotate", "pod", "other", "kvrouter.dev/block-size-")
    await until_there(frontend, 2)
    assert await completed(frontend)
    await here.kubectl("label", "pod", "wrong", "kvrouter.dev/engine-")
    await until_there(frontend, 1)


async def test_a_selector_restricts_the_engine_pods(here: PodsWithEngines) -> None:
    frontend = await here.up("team=a")
    await here.pod("one", zone=NEAR)
    await here.pod("two", zone=NEAR)
    await here.set_ready("one", "two")
    await here.kubectl("label", "pod", "two", "team=a")
    await until_there(frontend, 1)
    ((worker_id, *_),) = await there(frontend)
    assert worker_id == worker_id_of(await here.uid("two"))


async def test_required_kv_stays_in_the_zone_label_of_the_engine_pods(
    here: PodsWithEngines,
) -> None:
    frontend = await here.up(environ={"DYN_KV_TRANSFER_DOMAIN": "zone"})
    for zone in (NEAR, FAR):
        await here.pod(f"prefill-{zone}", zone=zone, role=Role.PREFILL)
        await here.pod(f"decode-{zone}", zone=zone, role=Role.DECODE)
    await here.set_ready(*here.engines)
    await until_there(frontend, 4)
    for _ in range(12):
        await completed(frontend)
    metrics = await frontend.metrics()
    kept = [metrics.total("handoffs_total", prefill_domain=zone, decode_domain=zone) for zone in (NEAR, FAR)]
    assert sum(kept) == metrics.total("handoffs_total") >= 12

    await here.delete(f"decode-{NEAR}")
    await until_there(frontend, 3)
    for _ in range(4):
        await completed(frontend)
    metrics = await frontend.metrics()
    assert metrics.total("handoffs_total", decode_domain=FAR) >= kept[1] + 4
    assert metrics.total("handoffs_total", decode_domain=NEAR) == kept[0]

    await here.set_ready(f"decode-{FAR}", ready=False)

    async def drains() -> bool:
        return any(is_draining for *_, is_draining in await there(frontend))

    await eventually(drains)
    await refused(frontend)


async def test_engines_stay_while_the_api_server_is_lost_and_update_after(
    here: PodsWithEngines,
) -> None:
    frontend = await here.up()
    await here.pod("one", zone=NEAR)
    await here.pod("two", zone=NEAR)
    await here.set_ready("one", "two")
    await until_there(frontend, 2)
    port = here.proxy.port
    await here.proxy.close()

    async def is_lost() -> bool:
        return (await frontend.metrics()).total("discovery_up") == 0

    await eventually(is_lost)
    await here.delete("one")
    assert len(await there(frontend)) == 2
    for _ in range(4):
        await completed(frontend)
    await here.proxy.start(port)
    await until_there(frontend, 1)
    assert (await frontend.metrics()).total("discovery_up") == 1
    assert await completed(frontend)


@pytest.fixture(params=["file", "kubernetes", "nats"])
def planes(
    request: pytest.FixtureRequest, here: PodsWithEngines, namespace: str, shared_nats: NatsServer
) -> Mapping[str, str]:
    """How processes of one fleet hear of each other."""
    if request.param == "nats":
        return {
            "DYN_DISCOVERY_BACKEND": "nats",
            "DYN_REQUEST_PLANE": "nats",
            "NATS_SERVER": shared_nats.url,
            "KVROUTER_PLANE_TOKEN": "t" * 32,
        }
    if request.param == "kubernetes":
        allow_cards(here.plane, namespace)
    return {"DYN_DISCOVERY_BACKEND": request.param, "DYN_EVENT_PLANE": "zmq"}


async def test_frontends_find_engine_pods_and_a_standby_process_takes_over(
    here: PodsWithEngines, planes: Mapping[str, str]
) -> None:
    await here.pod("one", zone=NEAR)
    await here.pod("two", zone=FAR)
    await here.set_ready("one", "two")
    first, frontend = await asyncio.gather(here.workers(planes), here.frontend(planes))
    await until_there(frontend, 2)
    before = await there(frontend)
    assert {worker_id for worker_id, *_ in before} == {
        worker_id_of(await here.uid(name)) for name in ("one", "two")
    }
    assert await completed(frontend)
    second = await here.workers(planes)

    async def waits() -> bool:
        return len(set(re.findall(r" worker_standby worker=(\d+)", second.lines()))) == 2

    await eventually(waits)
    assert await first.stop() == 0
    assert " drain " in first.lines()

    async def took_over() -> bool:
        return await there(frontend) == before

    await eventually(took_over)
    await until_there(frontend, 2)
    assert await completed(frontend)
    await here.set_ready("one", ready=False)

    async def one_drains() -> bool:
        return [is_draining for *_, is_draining in await there(frontend)].count(True) == 1

    await eventually(one_drains)
    await here.delete("one")
    await until_there(frontend, 1)
    assert "Traceback" not in first.lines() + second.lines()


async def test_an_engine_pod_process_accepts_once_it_has_listed_its_pods(
    here: PodsWithEngines,
) -> None:
    port, api_port = free_ports(1), here.proxy.port
    await here.proxy.close()
    workers = await here.workers({}, "--health-port", str(port))
    async with httpx.AsyncClient(base_url=f"http://{LOOPBACK}:{port}", timeout=60.0) as http:

        async def status() -> tuple[str, int]:
            accepts = await http.get("/accepting")
            return accepts.json()["status"], accepts.status_code

        async def is_ok() -> bool:
            return await status() == ("ok", 200)

        assert await status() == ("starting", 503)
        await here.proxy.start(api_port)
        await eventually(is_ok)
        await here.proxy.close()

        async def is_lost() -> bool:
            _, is_back, after = workers.lines().rpartition(" discovery_back ")
            return bool(is_back) and " discovery_lost " in after

        await eventually(is_lost)
        assert await is_ok()
    assert await workers.stop() == 0


def test_the_api_server_accepts_the_engine_pod_examples(plane: ControlPlane, namespace: str) -> None:
    plane.apply(
        *(
            each
            for name in ("kvrouter.yaml", "vllm.yaml", "sglang-prefill-decode.yaml")
            for each in example(name, namespace)
        )
    )

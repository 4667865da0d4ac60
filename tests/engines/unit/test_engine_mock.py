"""The driver of mock engines: real time times a speed-up, streams, credit, death, and a clock that slips."""

import asyncio
from collections.abc import Mapping

import pytest

from kvrouter.app.mock_fleet import mock_summary
from kvrouter.core.errors import ConfigError, InvalidRequest
from kvrouter.core.events import KvEvent, Stored
from kvrouter.core.ids import DpRank, WorkerId
from kvrouter.core.requests import Bootstrap, EngineRequest, FinishReason, Leg
from kvrouter.core.timing import Timing
from kvrouter.core.workers import LoadReport, Role
from kvrouter.engines.mock import MockCluster, MockEngineHandle
from kvrouter.engines.mock import cluster as mock_cluster
from kvrouter.engines.mock_engine.config import KvLoadFailurePolicy, MockConfig
from kvrouter.engines.port import Engine
from kvrouter.transports.requests.port import StreamBroken, WorkerUnreachable
from tests.testing.constants import SetConstants
from tests.testing.engine_requests import engine_request
from tests.testing.mock_engine import zone_links
from tests.testing.mock_processes import read_all
from tests.testing.waits import until

IN_TIME_S = 60.0


class Listener:
    """Remembers what an engine reported."""

    def __init__(self) -> None:
        self.events: list[tuple[DpRank, KvEvent]] = []
        self.loads: list[LoadReport] = []
        self.reported = asyncio.Event()

    def on_events(self, dp_rank: DpRank, events: tuple[KvEvent, ...]) -> None:
        self.events += [(dp_rank, event) for event in events]
        self.reported.set()

    def on_load(self, report: LoadReport) -> None:
        self.loads.append(report)


async def started(
    cluster: MockCluster, config: MockConfig, worker_id: int = 1, domain: str = "a"
) -> tuple[MockEngineHandle, Listener]:
    handle = cluster.add(config, worker_id=WorkerId(worker_id), domains={"zone": domain})
    listener = Listener()
    engine: Engine = handle
    await engine.start(listener.on_events, listener.on_load)
    return handle, listener


def a_leg(
    kind: Leg = Leg.AGGREGATED,
    *,
    max_tokens: int = 20,
    n_prompt: int = 100,
    room: int | None = None,
    params: Mapping[str, object] | None = None,
) -> EngineRequest:
    bootstrap = None if room is None else Bootstrap("10.0.0.1", 99, room)
    return engine_request(
        range(n_prompt), kind, max_tokens=max_tokens, bootstrap=bootstrap, kv_transfer_params=params
    )


async def test_tokens_events_and_load_reach_their_sinks() -> None:
    cluster = MockCluster(speedup=100.0)
    handle, listener = await started(cluster, MockConfig(block_size=16))
    tokens, last = await read_all(await handle.submit(a_leg()))
    assert len(tokens) == 20
    assert last.finish is FinishReason.LENGTH
    stored = [event for _, event in listener.events if isinstance(event, Stored)]
    assert sum(event.n_blocks for event in stored) == 7
    assert {report.rank.worker_id for report in listener.loads} == {1}
    assert listener.loads[-1].running_requests == 0
    assert cluster.idle
    assert cluster.check_integrity() == []
    assert (
        sum(
            len(event.engine_hashes) // 8 for event in handle.snapshot(DpRank(0)) if isinstance(event, Stored)
        )
        == 7
    )


@pytest.mark.parametrize("speedup", [20.0, 1_000.0])
async def test_speedup_changes_the_timing_and_not_the_tokens(speedup: float) -> None:
    cluster = MockCluster(speedup=speedup)
    handle, _ = await started(cluster, MockConfig())
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    tokens, _ = await read_all(await handle.submit(a_leg()))
    took_s = (loop.time() - began_s) * speedup
    assert took_s >= (Timing().prefill_ms(100) + 19 * Timing().decode_ms(0.0)) / 1_000.0 * 0.99
    reference = MockCluster(speedup=1e6)
    other, _ = await started(reference, MockConfig(block_size=7, max_num_batched_tokens=9))
    assert (await read_all(await other.submit(a_leg())))[0] == tokens


@pytest.mark.parametrize("bootstrap", [True, False])
async def test_each_handoff_completes_with_one_transfer(bootstrap: bool) -> None:
    cluster = MockCluster(speedup=200.0, links=zone_links())
    prefill, _ = await started(
        cluster, MockConfig(role=Role.PREFILL, bootstrap_host="10.0.0.1", bootstrap_port=99)
    )
    decode, _ = await started(cluster, MockConfig(role=Role.DECODE), 2, "b")
    room = 5 if bootstrap else None
    first = await prefill.submit(a_leg(Leg.PREFILL, max_tokens=1, room=room))
    if bootstrap:
        second = await decode.submit(a_leg(Leg.DECODE, room=room))
        await read_all(first)
    else:
        _, last = await read_all(first)
        second = await decode.submit(a_leg(Leg.DECODE, params=last.kv_transfer_params))
    tokens, _ = await read_all(second)
    assert len(tokens) == 20
    assert cluster.idle
    assert cluster.check_integrity() == []
    ((pair, carried),) = cluster.carried().items()
    assert (*pair, carried.transfers) == ("a", "b", 1)


async def test_cancel_ends_the_read_and_frees_everything() -> None:
    cluster = MockCluster(speedup=10.0)
    handle, _ = await started(cluster, MockConfig())
    stream = await handle.submit(a_leg(max_tokens=5_000))
    assert (await stream.__anext__()).cached_tokens == 0
    stream.cancel("client left")
    stream.cancel("client left")
    _, last = await read_all(stream)
    assert last.finish is FinishReason.CANCELLED
    assert cluster.idle
    assert cluster.check_integrity() == []


async def test_cancelling_an_ended_prefill_leg_frees_its_kv() -> None:
    cluster = MockCluster(speedup=100.0)
    handle, _ = await started(cluster, MockConfig(role=Role.PREFILL))
    stream = await handle.submit(a_leg(Leg.PREFILL, max_tokens=1))
    await read_all(stream)
    assert not cluster.idle
    stream.cancel("nobody decodes")
    assert cluster.idle


async def test_a_reader_that_does_not_read_holds_a_bounded_number_of_tokens() -> None:
    cluster = MockCluster(speedup=10_000.0, stream_tokens_max=16)
    handle, _ = await started(cluster, MockConfig())
    slow = await handle.submit(a_leg(max_tokens=200))
    tokens, _ = await read_all(await handle.submit(a_leg(max_tokens=400)))
    assert len(tokens) == 400
    first = await slow.__anext__()
    assert len(first.token_ids) == 16
    rest, _ = await read_all(slow)
    assert (first.token_ids + rest) == tokens[:200]
    assert cluster.idle


async def test_killed_engine_breaks_streams_and_reports_no_more_events() -> None:
    cluster = MockCluster(speedup=10.0)
    handle, listener = await started(cluster, MockConfig(block_size=4))
    stream = await handle.submit(a_leg(max_tokens=5_000))
    reader = asyncio.create_task(read_all(stream))
    async with asyncio.timeout(IN_TIME_S):
        await listener.reported.wait()
    handle.kill()
    handle.kill()
    reported = len(listener.events)
    with pytest.raises(StreamBroken, match="died"):
        await reader
    stream.cancel("too late")
    with pytest.raises(WorkerUnreachable):
        await handle.submit(a_leg())
    await asyncio.sleep(0.01)
    assert len(listener.events) == reported
    assert handle.snapshot(DpRank(0)) == ()
    assert not handle.serving


async def test_stop_breaks_streams_and_a_new_start_is_empty() -> None:
    cluster = MockCluster(speedup=100.0)
    handle, listener = await started(cluster, MockConfig(block_size=4))
    await read_all(await handle.submit(a_leg()))
    stream = await handle.submit(a_leg(max_tokens=5_000))
    await handle.stop()
    with pytest.raises(StreamBroken, match="stopped"):
        await read_all(stream)
    await handle.start(listener.on_events, listener.on_load)
    assert handle.snapshot(DpRank(0)) == ()
    stream = await handle.submit(a_leg())
    assert (await stream.__anext__()).cached_tokens == 0
    stream.cancel("enough")
    assert cluster.idle


@pytest.mark.parametrize("policy", list(KvLoadFailurePolicy))
async def test_decode_leg_fails_or_recomputes_after_prefill_engine_death(
    policy: KvLoadFailurePolicy,
) -> None:
    cluster = MockCluster(speedup=50.0)
    never_done = Timing(prefill_base=1e9)
    prefill, _ = await started(
        cluster,
        MockConfig(role=Role.PREFILL, bootstrap_host="10.0.0.1", bootstrap_port=99, timing=never_done),
    )
    decode, _ = await started(cluster, MockConfig(role=Role.DECODE, kv_load_failure_policy=policy), 2)
    doomed = await prefill.submit(a_leg(Leg.PREFILL, max_tokens=1, room=1, n_prompt=5_000))
    stream = await decode.submit(a_leg(Leg.DECODE, room=1, n_prompt=5_000))
    prefill.kill()
    with pytest.raises(StreamBroken):
        await read_all(doomed)
    tokens, last = await read_all(stream)
    assert last.finish is (FinishReason.ERROR if policy is KvLoadFailurePolicy.FAIL else FinishReason.LENGTH)
    assert len(tokens) == (0 if policy is KvLoadFailurePolicy.FAIL else 20)
    assert cluster.idle


async def test_mock_engine_refuses_bad_settings_bad_requests_and_a_full_queue() -> None:
    cluster = MockCluster()
    idle = cluster.add(MockConfig(), worker_id=WorkerId(9), domains={"zone": "a"})
    with pytest.raises(WorkerUnreachable, match="not serving"):
        await idle.submit(a_leg())
    handle, _ = await started(cluster, MockConfig(total_kv_blocks=2, max_waiting_seqs=1))
    with pytest.raises(InvalidRequest, match="need"):
        await handle.submit(a_leg(n_prompt=200))
    for _ in range(2):
        await handle.submit(a_leg())
    with pytest.raises(WorkerUnreachable, match="wait already"):
        await handle.submit(a_leg())
    with pytest.raises(InvalidRequest):
        await started(cluster, MockConfig())
    for wrong in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ConfigError):
            MockCluster(speedup=wrong)
    handle.kill()


async def test_overloaded_clock_slips_and_every_request_completes(
    set_constants: SetConstants,
) -> None:
    set_constants(mock_cluster, TURN_MAX_S=0.0)  # every turn is too short for its work
    cluster = MockCluster(speedup=1e6)
    handle, _ = await started(cluster, MockConfig())
    readers = [asyncio.create_task(read_all(await handle.submit(a_leg(max_tokens=500)))) for n in range(50)]
    for reader in readers:
        assert len((await reader)[0]) == 500
    assert f"the engines' clock stood still for {cluster.slipped_s:.3f} s" in mock_summary(cluster)


async def test_chunks_that_wait_are_merged_and_a_stream_has_one_reader() -> None:
    cluster = MockCluster(speedup=200.0)
    handle, _ = await started(cluster, MockConfig())
    stream = await handle.submit(a_leg(max_tokens=400))
    reader = asyncio.create_task(stream.__anext__())
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="one reader"):
        await stream.__anext__()
    first = await reader
    await until(lambda: cluster.idle)
    rest = await stream.__anext__()
    assert len(first.token_ids) + len(rest.token_ids) == 400
    assert (first.cached_tokens, rest.finish) == (0, FinishReason.LENGTH)

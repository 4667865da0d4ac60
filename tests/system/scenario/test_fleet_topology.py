"""Transfer policies on a mock fleet in two zones: where KV goes, and what is refused."""

import asyncio
from collections import Counter

import pytest
from msgspec.structs import replace

from kvrouter.core.constraints import RouterMode, RoutingConstraints
from kvrouter.core.errors import InvalidRequest, NoEligibleWorker, Reason, UnknownModel
from kvrouter.core.ids import ModelName, Taint, WorkerId
from kvrouter.core.requests import Leg
from kvrouter.core.workers import Role
from kvrouter.kernel.topology.policy import MismatchPolicy
from kvrouter.settings.router_settings import KvRouterConfig
from tests.testing.mock_fleet import (
    PATIENT_S,
    MockFleetHarness,
    accepted,
    fleet_file,
    on_first,
    prompt,
    running_mock_fleet,
    uniform_fleet,
    zoned_fleet,
)
from tests.testing.waits import until

HANDOFFS = pytest.mark.parametrize("handoff", ["bootstrap", "synchronous"])
PREFILL_A, DECODE_A = WorkerId(1), (WorkerId(2), WorkerId(3))
PREFILL_B, DECODE_B = WorkerId(4), (WorkerId(5), WorkerId(6))

BLOCKS = KvRouterConfig(router_cost="blocks")
"""Weighs no links, so that a policy alone keeps KV from crossing."""


async def empty_zone_a_of_decode(harness: MockFleetHarness) -> None:
    for worker_id in DECODE_A:
        await harness.fleet.kill(worker_id)


async def move(harness: MockFleetHarness, worker_id: WorkerId, zone: str) -> None:
    """The worker's label changes: it publishes its card again."""
    worker = harness.fleet.workers[worker_id]
    config = worker.card.runtime_config
    await worker.publish_runtime_config(replace(config, topology_domains={"zone": zone}))


@HANDOFFS
async def test_required_refuses_when_the_zones_last_decode_worker_is_gone(handoff: str) -> None:
    async with running_mock_fleet(zoned_fleet(handoff=handoff)) as harness:
        await empty_zone_a_of_decode(harness)
        with pytest.raises(NoEligibleWorker) as refused:
            await harness.read(harness.request(prefill_worker_id=PREFILL_A))
        assert refused.value.domain == "zone"
        assert refused.value.retry_after_s == 1
        assert refused.value.refusals == {Reason.DOMAIN_MISMATCH: 2}
        assert harness.plane.opened == [], "no prefill was sent"
        assert harness.telemetry.refusals.value("domain_mismatch", "decode") == 2
        _, generation = await harness.read(harness.request())
        assert generation.placement is not None
        assert generation.placement.prefill_pick.rank.worker_id == PREFILL_B, "the other zone serves on"
        assert harness.crossed() == 0


@HANDOFFS
async def test_required_waits_for_a_decode_worker_to_join(handoff: str) -> None:
    async with running_mock_fleet(
        zoned_fleet(handoff=handoff), KvRouterConfig(router_domain_wait_s=60.0)
    ) as harness:
        old = harness.fleet.workers[DECODE_A[0]]
        await empty_zone_a_of_decode(harness)
        reading = asyncio.create_task(harness.read(harness.request(prefill_worker_id=PREFILL_A)))
        await until(lambda: len(harness.model.placer.waiting) == 1)
        assert harness.plane.opened == []
        await harness.revive(old)
        tokens, _ = await reading
        assert len(tokens) == 8
        assert harness.legs(Leg.DECODE) == [DECODE_A[0]]
        assert harness.telemetry.domain_waits.value("joined") == 1


async def test_a_joining_decode_worker_ends_all_domain_waits() -> None:
    async with running_mock_fleet(zoned_fleet(), KvRouterConfig(router_domain_wait_s=60.0)) as harness:
        old = harness.fleet.workers[DECODE_A[0]]
        await empty_zone_a_of_decode(harness)
        requests = [harness.request(prompt(first=n), prefill_worker_id=PREFILL_A) for n in range(60)]
        reading = [asyncio.create_task(harness.read(request)) for request in requests]
        await until(lambda: len(harness.model.placer.waiting) == 60)
        await harness.revive(old)
        answers = await asyncio.gather(*reading)
        assert all(len(tokens) == 8 for tokens, _ in answers)
        assert harness.telemetry.domain_waits.value("joined") == 60


@HANDOFFS
async def test_fallback_crosses_zones_only_without_a_local_decode_worker(handoff: str) -> None:
    async with running_mock_fleet(zoned_fleet(handoff=handoff, enforcement="fallback"), BLOCKS) as harness:
        for n in range(6):
            await harness.read(harness.request(prompt(first=n)))
        assert harness.crossed() == 0
        await empty_zone_a_of_decode(harness)
        for n in range(4):
            await harness.read(harness.request(prompt(first=10 + n)))
        assert harness.crossed() == 0, "prefill goes where decode workers are"
        tokens, generation = await harness.read(harness.request(prefill_worker_id=PREFILL_A))
        assert len(tokens) == 8
        assert generation.placement is not None
        assert generation.placement.decision.fallback_used
        assert harness.telemetry.fallbacks.value("zone") == 1
        assert harness.telemetry.handoffs.value("a", "b") == 1
        carried = {tuple(pair): what for pair, what in harness.fleet.cluster.carried().items()}
        assert carried["a", "b"].transfers == 1
        assert carried["a", "b"].arrived_bytes == 100 * 131_072


@HANDOFFS
async def test_preferred_stays_in_zone_when_idle_and_may_cross(handoff: str) -> None:
    async with running_mock_fleet(zoned_fleet(handoff=handoff, enforcement="preferred")) as harness:
        for n in range(8):
            await harness.read(harness.request(prompt(first=n)))
        assert harness.crossed() == 0, "an idle fleet has no reason to cross"
        await empty_zone_a_of_decode(harness)
        await harness.read(harness.request(prefill_worker_id=PREFILL_A))
        assert harness.crossed() == 1
        assert harness.telemetry.handoffs.value("a", "b") == 1
        assert harness.telemetry.fallbacks.value("zone") == 0, "a preference is not a rule that was broken"


async def test_kv_crosses_zones_freely_without_a_policy() -> None:
    async with running_mock_fleet(zoned_fleet(enforcement=None), BLOCKS) as harness:
        for n in range(16):
            await harness.read(harness.request(prompt(first=n)))
        assert harness.crossed() > 0
        assert harness.telemetry.handoffs.value("none", "none") == 16


@pytest.mark.parametrize("mismatch", list(MismatchPolicy))
async def test_the_routers_own_level_governs_workers_without_a_policy(mismatch: MismatchPolicy) -> None:
    config = KvRouterConfig(kv_transfer_topology_level="zone", kv_transfer_mismatch_policy=mismatch)
    async with running_mock_fleet(zoned_fleet(enforcement=None), config) as harness:
        for n in range(8):
            await harness.read(harness.request(prompt(first=n)))
        assert harness.crossed() == 0
        await empty_zone_a_of_decode(harness)
        request = harness.request(prefill_worker_id=PREFILL_A)
        if mismatch is MismatchPolicy.FAIL:
            with pytest.raises(NoEligibleWorker):
                await harness.read(request)
        else:
            await harness.read(request)
            assert harness.crossed() == harness.telemetry.fallbacks.value("zone") == 1


@HANDOFFS
@pytest.mark.parametrize("mode", list(RouterMode))
async def test_no_routing_mode_crosses_a_required_domain(handoff: str, mode: RouterMode) -> None:
    config = KvRouterConfig(router_mode=mode, router_temperature=0.5)
    async with running_mock_fleet(zoned_fleet(handoff=handoff), config) as harness:
        requests = [harness.request(prompt(first=n % 7), max_tokens=40) for n in range(40)]
        answers = await asyncio.gather(*(harness.read(request) for request in requests))
        assert all(len(tokens) == 40 for tokens, _ in answers)
        assert harness.crossed() == 0
        handed = sum(harness.telemetry.handoffs.value(zone, zone) for zone in "ab")
        assert handed == 40
        assert set(harness.legs(Leg.DECODE)) == set(harness.workers(Role.DECODE)), "everyone has work"
        if mode is RouterMode.ROUND_ROBIN:
            assert set(Counter(harness.legs(Leg.PREFILL)).values()) == {20}
            assert set(Counter(harness.legs(Leg.DECODE)).values()) == {10}


async def test_a_changed_zone_label_moves_traffic() -> None:
    async with running_mock_fleet(zoned_fleet()) as harness:
        await move(harness, DECODE_A[0], "b")
        for n in range(3):
            await harness.read(harness.request(prompt(first=n), prefill_worker_id=PREFILL_A))
        assert set(harness.legs(Leg.DECODE)) == {DECODE_A[1]}
        await harness.fleet.kill(DECODE_A[1])
        with pytest.raises(NoEligibleWorker):
            await harness.read(harness.request(prefill_worker_id=PREFILL_A))
        await move(harness, DECODE_A[0], "a")
        await harness.read(harness.request(prefill_worker_id=PREFILL_A))
        assert harness.legs(Leg.DECODE)[-1] == DECODE_A[0]
        await move(harness, PREFILL_A, "b")
        await harness.read(harness.request(prefill_worker_id=PREFILL_A))
        assert harness.legs(Leg.DECODE)[-1] in DECODE_B


async def test_a_label_changed_during_prefill_applies_to_decode() -> None:
    """The domain was fixed with the prefill worker: a decode worker that moved away is not used."""
    async with running_mock_fleet(zoned_fleet(handoff="synchronous")) as harness:

        async def move_both(_: object) -> None:
            assert generation.placement is not None
            worker_id = generation.placement.decision.decode.rank.worker_id
            await move(harness, worker_id, "c")

        harness.plane.hook = on_first(accepted(Leg.PREFILL), move_both)
        async with harness.service.requests.generate(harness.request()) as generation:
            async for _ in generation:
                pass
        (decode,) = harness.legs(Leg.DECODE)
        assert harness.zone_of(decode) == harness.zone_of(harness.legs(Leg.PREFILL)[0])


async def test_a_request_may_require_its_zone_and_its_worker() -> None:
    async with running_mock_fleet(zoned_fleet()) as harness:
        zone_b = RoutingConstraints(required_taints=frozenset({Taint("dynamo.topology/zone=b")}))
        for n in range(4):
            await harness.read(harness.request(prompt(first=n), constraints=zone_b))
        assert set(harness.legs(Leg.DECODE)) <= set(DECODE_B)
        assert set(harness.legs(Leg.PREFILL)) == {PREFILL_B}
        await harness.read(harness.request(worker_id=DECODE_A[1]))
        assert harness.legs(Leg.DECODE)[-1] == DECODE_A[1]
        assert harness.legs(Leg.PREFILL)[-1] == PREFILL_A, "the pair follows the worker that was asked for"
        with pytest.raises(NoEligibleWorker):
            await harness.read(harness.request(worker_id=DECODE_A[1], constraints=zone_b))


async def test_a_draining_worker_gets_no_new_requests() -> None:
    async with running_mock_fleet(zoned_fleet(decode=1)) as harness:
        worker = harness.fleet.workers[WorkerId(2)]
        await worker.begin_drain()
        for n in range(3):
            await harness.read(harness.request(prompt(first=n)))
        assert set(harness.legs(Leg.DECODE)) == {WorkerId(4)}
        assert set(harness.legs(Leg.PREFILL)) == {WorkerId(3)}


async def test_every_dp_rank_serves_and_can_be_pinned() -> None:
    async with running_mock_fleet(uniform_fleet(replicas=2, dp_size=2)) as harness:
        requests = [harness.request(prompt(first=n), max_tokens=100) for n in range(16)]
        answers = await asyncio.gather(*(harness.read(request) for request in requests))
        used = Counter(g.placement.decision.decode.rank for _, g in answers if g.placement is not None)
        assert set(used) == set(harness.ranks())
        assert max(used.values()) <= 6, "load is even over ranks"
        await harness.read(harness.request(worker_id=2, dp_rank=1))
        request = harness.plane.opened[-1].request
        assert (harness.plane.opened[-1].worker_id, request.dp_rank) == (2, 1)
        await harness.until_index_is_true()


@HANDOFFS
async def test_pairs_with_several_dp_ranks_hand_over_kv(handoff: str) -> None:
    engine = f"{{handoff: {handoff}, kv_wait_expiry_s: {PATIENT_S}}}"
    text = f"""
version: 1
models: [{{name: mock, block_size: 16}}]
workers:
  - {{name: prefill, role: prefill, dp_size: 3, engine: {engine}}}
  - {{name: decode, role: decode, replicas: 2, dp_size: 2, engine: {engine}}}
speedup: 1000
"""
    async with running_mock_fleet(fleet_file(text)) as harness:
        requests = [harness.request(prompt(first=n), max_tokens=50) for n in range(18)]
        answers = await asyncio.gather(*(harness.read(request) for request in requests))
        assert all(len(tokens) == 50 for tokens, _ in answers)
        ranks = {(stream.worker_id, stream.request.dp_rank) for stream in harness.plane.opened}
        assert ranks == set(harness.ranks())
        await harness.until_index_is_true()


async def test_requests_stay_with_their_models_workers() -> None:
    text = """
version: 1
models: [{name: small, block_size: 16}, {name: large, block_size: 32}]
workers:
  - {name: small, model: small, replicas: 2}
  - {name: large-prefill, model: large, role: prefill, engine: {handoff: synchronous}}
  - {name: large-decode, model: large, role: decode, replicas: 2}
speedup: 1000
"""
    small, large = ModelName("small"), ModelName("large")
    async with running_mock_fleet(fleet_file(text)) as harness:
        requests = [harness.request(prompt(first=n), model=(small, large)[n % 2]) for n in range(12)]
        await asyncio.gather(*(harness.read(request) for request in requests))
        by_model = {
            model: {s.worker_id for s in harness.plane.opened if s.request.model == model}
            for model in (small, large)
        }
        assert by_model == {small: {1, 2}, large: {3, 4, 5}}
        await harness.until_index_is_true()
        _, generation = await harness.read(harness.request(prompt(first=1), model=large))
        assert generation.usage.cached_tokens == 96
        with pytest.raises(UnknownModel, match="large, small"):
            harness.service.requests.generate(harness.request(model=ModelName("medium")))
        with pytest.raises(NoEligibleWorker) as refused:
            await harness.read(harness.request(model=small, worker_id=4))
        assert refused.value.refusals == {Reason.PINNED_ELSEWHERE: 2}


async def test_a_prompt_too_large_for_every_worker_is_an_invalid_request() -> None:
    async with running_mock_fleet(uniform_fleet(engine="{total_kv_blocks: 8}")) as harness:
        with pytest.raises(InvalidRequest, match="blocks"):
            await harness.read(harness.request(prompt(tokens=200)))
        assert not any(leg.is_accepted for leg in harness.plane.opened)
        assert harness.telemetry.retries.value("mock", "aggregated") == 0

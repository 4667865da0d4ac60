"""The placer of one model, without a service."""

from array import array
from collections import Counter
from dataclasses import replace
from random import Random

import numpy as np
import numpy.typing as npt
import pytest
from msgspec import structs

from kvrouter.core.constraints import QueuePolicy, RouterMode
from kvrouter.core.cordon_rules import Cordon, CordonRules
from kvrouter.core.errors import NoEligibleWorker
from kvrouter.core.hashing import Prompt
from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.core.requests import GenerateRequest, ServiceLevel
from kvrouter.core.timing import Timing
from kvrouter.core.workers import KvFormat, ModelRuntimeConfig, Role
from kvrouter.frontend.response_passthrough import text_ids_of
from kvrouter.kernel.fleet.fleet import Fleet
from kvrouter.kernel.index import NativeApproximateIndex
from kvrouter.kernel.placement.attempt_request import prompt_of
from kvrouter.kernel.placement.cache_view import U32, CacheView, NoCacheView, PredictedCacheView
from kvrouter.kernel.placement.placement import Draw, Placement
from kvrouter.kernel.placement.placer import PREFILLS_PASSED, Placer
from kvrouter.kernel.routing.costs.time import prompt_s
from kvrouter.kernel.routing.interface import RoutingSettings
from kvrouter.kernel.topology.link_table import Link, LinkTable
from tests.testing.placement_events import A_DRAW, first_attempt, plain_placer
from tests.testing.router_harness import BLOCK_SIZE, MODEL, card, generate_request


def placer_of(
    *workers: tuple[int, Role],
    mode: RouterMode = RouterMode.KV,
    settings: RoutingSettings | None = None,
    cache: CacheView | None = None,
) -> Placer:
    fleet = Fleet(MODEL, BLOCK_SIZE)
    for worker_id, role in workers:
        fleet.join(card(worker_id, role))
    return plain_placer(fleet, settings=settings or RoutingSettings(mode=mode), cache=cache or NoCacheView())


def place(placer: Placer, draw: Draw = A_DRAW) -> Placement:
    request = generate_request(request_id=f"r{draw.turn}")
    return placer.place(first_attempt(request), draw, now_s=0.0)


def leave(placer: Placer, worker_id: int) -> None:
    for slot in placer.fleet.leave(WorkerId(worker_id), Epoch(1)):
        placer.freed(slot)
    placer.fleet_changed(now_s=0.0)


@pytest.mark.parametrize("policy", QueuePolicy)
def test_slack_is_the_prefill_that_no_worker_has_cached_or_the_deadline(policy: QueuePolicy) -> None:
    placer = placer_of(
        (1, Role.BOTH),
        (2, Role.BOTH),
        cache=PredictedCacheView(NativeApproximateIndex(ttl_s=60.0, max_blocks=1024, prune_target_ratio=0.8)),
    )
    placer.waiting.limits = replace(placer.waiting.limits, policy=policy, request_timeout_s=60.0)
    in_time = structs.replace(generate_request(tokens=4096), service_level=ServiceLevel(ttft_slo_s=2.0))

    def slack_s(request: GenerateRequest) -> float:
        prompt = prompt_of(request, request.token_ids, block_size=BLOCK_SIZE)
        return placer.slack_s(request, prompt, now_s=0.0)

    before_s = [slack_s(request) for request in (generate_request(tokens=4096), in_time)]
    placer.place(first_attempt(generate_request(tokens=4096 - BLOCK_SIZE)), A_DRAW, now_s=0.0)
    after_s = slack_s(in_time)
    if policy is QueuePolicy.SHORTEST:
        assert before_s == [PREFILLS_PASSED * prompt_s(Timing(), 4096)] * 2
        assert after_s == PREFILLS_PASSED * prompt_s(Timing(), BLOCK_SIZE)
    else:
        assert [*before_s, after_s] == ([0.0] * 3 if policy is QueuePolicy.FCFS else [60.0, 2.0, 2.0])


def test_slack_of_a_text_counts_the_blocks_of_prompts_that_begin_alike() -> None:
    guesses = []

    class Guesses(PredictedCacheView):
        def overlap(self, prompt: Prompt, n_slots: int, *, now_s: float, is_guess: bool = False) -> U32:
            guesses.append(is_guess)
            return super().overlap(prompt, n_slots, now_s=now_s)

    index = NativeApproximateIndex(ttl_s=60.0, max_blocks=1024, prune_target_ratio=0.8)
    placer = placer_of((1, Role.BOTH), (2, Role.BOTH), cache=Guesses(index))
    placer.waiting.limits = replace(placer.waiting.limits, policy=QueuePolicy.SHORTEST)

    def text(size: int, *, begins: str = "x") -> GenerateRequest:
        text_ids = text_ids_of(begins * size)
        changes = {"token_ids": array("I"), "isl_tokens_estimate": len(text_ids), "text_ids": text_ids}
        return structs.replace(generate_request(request_id=f"{begins}{size}"), **changes)

    def slack_s(request: GenerateRequest) -> float:
        prompt = prompt_of(request, request.token_ids, block_size=BLOCK_SIZE)
        return placer.slack_s(request, prompt, now_s=0.0)

    cold_s = PREFILLS_PASSED * prompt_s(Timing(), 4096)
    assert slack_s(text(4 * 4096)) == cold_s
    placer.place(first_attempt(text(4 * (4096 - BLOCK_SIZE))), A_DRAW, now_s=0.0)
    assert slack_s(text(4 * 4096)) == PREFILLS_PASSED * prompt_s(Timing(), BLOCK_SIZE)
    assert slack_s(text(4 * 4096, begins="y")) == cold_s
    assert all(guesses)


@pytest.mark.parametrize("mode", RouterMode)
def test_a_decode_worker_that_leaves_during_prefill_is_replaced(mode: RouterMode) -> None:
    """Its slot may be the last one, which is gone from every column."""
    placer = placer_of((1, Role.PREFILL), (2, Role.DECODE), (3, Role.DECODE), mode=mode)
    placement = next(
        placement
        for turn in range(64)
        if (placement := place(placer, Draw(turn, turn, 0))).decision.decode.rank.worker_id == 3
    )
    leave(placer, 3)
    assert placer.pick_decode_again(placement, now_s=0.0)
    assert placement.decision.decode.rank.worker_id == 2


def of_format(placer: Placer, worker_id: int, role: Role, version: str) -> None:
    config = ModelRuntimeConfig(kv_format=KvFormat(version=version))
    placer.fleet.join(structs.replace(card(worker_id, role), runtime_config=config))


@pytest.mark.parametrize("prefill_leaves", [False, True])
@pytest.mark.parametrize("mode", RouterMode)
def test_kv_never_goes_to_another_format(mode: RouterMode, *, prefill_leaves: bool) -> None:
    placer = placer_of(mode=mode)
    of_format(placer, 1, Role.PREFILL, "old")
    for worker_id in (2, 3):
        of_format(placer, worker_id, Role.DECODE, "old")
    placements = [place(placer, Draw(turn, turn, 0)) for turn in range(8)]
    for worker_id in (4, 5, 6):
        of_format(placer, worker_id, Role.DECODE, "new")
    if prefill_leaves:
        leave(placer, 1)
    leave(placer, 2)
    for placement in placements:
        placer.pick_decode_again(placement, now_s=0.0)
        assert placement.decision.decode.rank.worker_id == 3
    leave(placer, 3)
    with pytest.raises(NoEligibleWorker, match="3 cannot_transfer"):
        placer.pick_decode_again(placements[0], now_s=0.0)


def test_a_cordoned_worker_of_another_format_does_not_keep_the_kv() -> None:
    placer = placer_of()
    of_format(placer, 1, Role.PREFILL, "old")
    of_format(placer, 2, Role.DECODE, "old")
    placement = place(placer)
    placer.fleet.set_cordons(CordonRules((Cordon("worker", "2"),)))
    assert not placer.pick_decode_again(placement, now_s=0.0)
    of_format(placer, 2, Role.DECODE, "new")
    with pytest.raises(NoEligibleWorker, match="1 cordoned"):
        placer.pick_decode_again(placement, now_s=0.0)


@pytest.mark.parametrize("mode", RouterMode)
def test_picking_decode_again_without_a_decode_worker_is_refused(mode: RouterMode) -> None:
    placer = placer_of((1, Role.PREFILL), (2, Role.DECODE), mode=mode)
    placement = place(placer)
    leave(placer, 2)
    with pytest.raises(NoEligibleWorker):
        placer.pick_decode_again(placement, now_s=0.0)


@pytest.mark.parametrize(("lookahead_tokens", "overlap_blocks"), [(0, 2), (1, 1), (BLOCK_SIZE, 1), (64, 0)])
def test_overlap_excludes_blocks_within_the_lookahead_tokens(
    lookahead_tokens: int, overlap_blocks: int
) -> None:
    class TwoBlocks(NoCacheView):
        def overlap(self, *_: object, **__: object) -> npt.NDArray[np.uint32]:
            return np.array([2], np.uint32)

    placer = placer_of((1, Role.BOTH))
    placer.cache = TwoBlocks()
    placer.fleet.join(structs.replace(card(1), lookahead_tokens=lookahead_tokens))
    assert place(placer).decision.decode.overlap_blocks == overlap_blocks


def test_the_bootstrap_room_is_drawn_and_maps_to_its_rank() -> None:
    placer = placer_of((2, Role.DECODE))
    placer.fleet.join(card(1, Role.PREFILL, bootstrap=True, dp_size=4))
    rooms = set[int]()
    for turn in range(16):
        placement = place(placer, Draw(turn, turn, turn * 0x1234567))
        assert placement.bootstrap is not None
        assert placement.bootstrap.room % 4 == placement.prefill_pick.rank.dp_rank
        rooms.add(placement.bootstrap.room)
    assert len(rooms) == 16


def test_a_released_placement_leaves_no_load() -> None:
    placer = placer_of((1, Role.PREFILL), (2, Role.DECODE))
    placement = place(placer)
    assert len(placer.ledger) == 2
    placer.release(placement, now_s=0.0)
    placer.release(placement, now_s=0.0)
    assert len(placer.ledger) == 0


def test_a_transfer_loads_its_link_until_the_first_token() -> None:
    links = LinkTable({"zone": Link(1e-4, 1e6)}, Link(1e-4, 0.9e6), {})
    placer = placer_of(settings=RoutingSettings(cost="time", links=links))
    for worker_id, role, zone in ((1, Role.PREFILL, "a"), (2, Role.DECODE, "a"), (3, Role.DECODE, "b")):
        config = ModelRuntimeConfig(
            topology_domains={"zone": zone}, topology_levels=("zone",), kv_bytes_per_token=1000
        )
        placer.fleet.join(structs.replace(card(worker_id, role), runtime_config=config))
    loads = placer.transfers.state
    first = place(placer)
    assert first.decision.decode.rank.worker_id == 2
    assert [load for _, load in loads.loads()] == [(1000 * first.prompt.isl_tokens, 1)]
    assert not placer.pick_decode_again(first, now_s=0.0)
    second = place(placer, Draw(1, 1, 1))
    assert second.decision.decode.rank.worker_id == 3
    assert [load.transfers for _, load in loads.loads()] == [1, 1]
    leave(placer, 2)
    assert placer.pick_decode_again(first, now_s=0.0)
    assert [load.transfers for _, load in loads.loads()] == [2]
    placer.first_token(first, now_s=1.0)
    placer.release(first, now_s=2.0)
    placer.release(second, now_s=2.0)
    assert len(loads) == 0


def test_a_request_that_outlives_its_workers_leaves_no_load() -> None:
    links = LinkTable({"zone": Link(1e-4, 1e6)}, Link(1e-4, 0.9e6), {})
    workers = ((1, Role.DECODE), (2, Role.PREFILL))
    placer = placer_of(*workers, settings=RoutingSettings(cost="time", links=links))
    begun, late, waiting = (place(placer, Draw(turn, turn, turn)) for turn in range(3))
    placer.first_token(begun, now_s=1.0)
    leave(placer, 2)
    placer.fleet.join(card(3, Role.BOTH))
    assert waiting.decision.prefill is not None
    placer.pick_decode_again(waiting, now_s=1.0)
    leave(placer, 3)
    leave(placer, 1)
    placer.first_token(late, now_s=1.0)
    for placement in (begun, late, waiting):
        placer.release(placement, now_s=2.0, tokens=50)
    assert len(placer.ledger) == 0
    assert len(placer.transfers.state) == 0


@pytest.mark.parametrize("took_s", [0.0005, 0.003, 0.05, 2.0])
def test_equal_workers_of_an_idle_fleet_share_requests_at_any_speed(took_s: float) -> None:
    """The timing that is expected of them may be of a much slower engine, or of a faster one."""
    settings = RoutingSettings(cost="time")
    placer = placer_of(*((worker, Role.BOTH) for worker in range(1, 5)), settings=settings)
    rng, sent, now_s = Random(1), Counter[int](), 10.0
    for number in range(400):
        request = generate_request(request_id=f"r{number}", tokens=400)
        placement = placer.place(first_attempt(request), Draw(rng.getrandbits(64), number, 0), now_s=now_s)
        sent[placement.decision.decode.rank.worker_id] += 1
        now_s += took_s * rng.uniform(0.9, 1.1)
        placer.first_token(placement, now_s=now_s)
        now_s += 0.2
        placer.release(placement, now_s=now_s, tokens=8)
    assert min(sent[worker] for worker in range(1, 5)) > 60

"""Which requests are refused because they would be late: the laws, and the share of critical work."""

from array import array

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import structs

from kvrouter.core.constraints import PdSelection, Pin, RouterMode, RoutingConstraints
from kvrouter.core.errors import Reason, SloUnreachable
from kvrouter.core.ids import DpRank, RequestId, Slot, Taint, WorkerId, WorkerRank
from kvrouter.core.requests import GenerateRequest, Leg, ServiceLevel
from kvrouter.core.timing import Timing
from kvrouter.core.workers import Role
from kvrouter.kernel.index import NativeApproximateIndex
from kvrouter.kernel.placement.cache_view import PredictedCacheView
from kvrouter.kernel.placement.placer import Placer
from kvrouter.kernel.placement.service_levels import HALF_LIFE_S, SHARE_MAX, CriticalWork, refuse_late
from kvrouter.kernel.routing.costs.time import prompt_s
from kvrouter.kernel.routing.interface import Decision, Pick, RoutingSettings, Times
from kvrouter.kernel.topology.link_table import Link, LinkTable
from tests.kernel.unit.test_placer import placer_of
from tests.testing.placement_events import A_DRAW, first_attempt
from tests.testing.router_harness import card, generate_request

CRITICAL, OTHER = ServiceLevel(strict_priority=1), ServiceLevel()
SECONDS = st.floats(0.0, 100.0)
SHARES = st.floats(0.0, SHARE_MAX)
TIMES = st.builds(
    Times,
    queue_s=SECONDS,
    prefill_s=SECONDS,
    memory_s=SECONDS,
    decode_s=SECONDS,
    others_s=SECONDS,
    turnover_s=SECONDS,
    transfer_s=SECONDS,
)


def pick(leg: Leg, times: Times | None) -> Pick:
    return Pick(Slot(0), WorkerRank(WorkerId(1), DpRank(0)), leg, 0, 0.0, 0.0, 0.0, 1.0, 0.0, 1, times=times)


def aggregated(times: Times | None) -> Decision:
    return Decision(RequestId("r"), 0, RouterMode.KV, pick(Leg.AGGREGATED, times))


def refusal_of(
    decision: Decision, level: ServiceLevel, share: float, limit_s: float
) -> SloUnreachable | None:
    try:
        refuse_late(decision, level, share, limit_s)
    except SloUnreachable as refused:
        return refused
    return None


def is_refused(decision: Decision, level: ServiceLevel, share: float, limit_s: float) -> bool:
    return refusal_of(decision, level, share, limit_s) is not None


@given(TIMES, SHARES, SECONDS)
def test_a_critical_request_is_refused_only_when_it_is_predicted_late(
    times: Times, share: float, limit_s: float
) -> None:
    assert is_refused(aggregated(times), CRITICAL, share, limit_s) == (times.expected_s > limit_s)


@given(TIMES, SHARES, SECONDS)
def test_critical_requests_are_refused_last(times: Times, share: float, limit_s: float) -> None:
    decision = aggregated(times)
    critical, other = (is_refused(decision, level, share, limit_s) for level in (CRITICAL, OTHER))
    assert other >= critical
    assert is_refused(decision, OTHER, 0.0, limit_s) == critical, "nobody else is to be left anything"
    assert is_refused(decision, OTHER, SHARE_MAX, limit_s) >= other, "the share leaves no less"


@given(SHARES, SECONDS)
def test_nothing_is_refused_without_a_prediction(share: float, limit_s: float) -> None:
    assert not is_refused(aggregated(None), OTHER, share, limit_s)


@given(TIMES, TIMES, SECONDS)
def test_both_legs_of_a_pair_count(prefill: Times, decode: Times, limit_s: float) -> None:
    picks = pick(Leg.DECODE, decode), pick(Leg.PREFILL, prefill)
    decision = Decision(RequestId("r"), 0, RouterMode.KV, picks[0], picks[1])
    together = structs.replace(decision, together=True)
    expected_s = prefill.expected_s + decode.expected_s
    assert is_refused(together, CRITICAL, 0.0, limit_s) == (expected_s > limit_s)
    expected_s -= min(decode.memory_s, prefill.queue_s + prefill.prefill_s)
    assert is_refused(decision, CRITICAL, 0.0, limit_s) == (expected_s > limit_s), "memory comes free"


def test_a_refusal_says_when_to_try_again() -> None:
    times = Times(4.0, 1.0, 0.5, 9.0, 9.0, 9.0, 0.25)
    with pytest.raises(SloUnreachable) as caught:
        refuse_late(aggregated(times), OTHER, 0.25, 2.0)
    refused = caught.value
    assert refused.message == (
        "the first token is predicted in 5.75 s, with 1.5 s left to critical requests; "
        "it is of use within 2 s"
    )
    assert (refused.retry_after_s, refused.role, refused.refusals) == (6, "decode", {Reason.TOO_LATE: 1})
    assert (refused.http_status, refused.code) == (429, "slo_unreachable")
    with pytest.raises(SloUnreachable) as caught:
        refuse_late(aggregated(times), OTHER, 0.25, 7.25, waited_s=0.5)
    assert caught.value.retry_after_s == 1, "a request that comes again has not waited"
    refuse_late(aggregated(times), OTHER, 0.25, 7.25)
    refuse_late(aggregated(times), CRITICAL, 0.25, 5.75)


@given(TIMES, SHARES, SECONDS)
def test_a_refusal_says_to_try_again_only_after_a_wait_that_can_help(
    times: Times, share: float, limit_s: float
) -> None:
    refused = refusal_of(aggregated(times), OTHER, share, limit_s)
    after_s = 0 if refused is None else refused.retry_after_s
    assert (after_s is None) == (refused is not None and times.prefill_s > limit_s)
    if refused is not None and after_s is not None:
        left_s = max(0.0, (times.queue_s + times.memory_s) / (1.0 - share) - after_s)
        assert left_s + times.prefill_s <= limit_s + 1e-9


def test_a_wait_can_help_where_a_worker_with_a_queue_has_the_prompt() -> None:
    cache = PredictedCacheView(NativeApproximateIndex(ttl_s=60.0, max_blocks=10_000, prune_target_ratio=0.8))
    placer = placer_of((1, Role.BOTH), (2, Role.BOTH), settings=AGGREGATED, cache=cache)
    request = generate_request(tokens=16_000)
    first = placer.place(first_attempt(pinned(request, None, 1)), A_DRAW, now_s=0.0)
    placer.first_token(first, now_s=0.1)
    placer.release(first, now_s=0.1)
    busy = []
    for number, begin in ((1, 20_000), (1, 40_000), (1, 60_000), (2, 80_000)):
        n_tokens = 16_000 if number == 1 else 64
        other = generate_request(tokens=n_tokens, request_id=f"b{begin}")
        other = structs.replace(
            pinned(other, None, number), token_ids=array("I", range(begin, begin + n_tokens))
        )
        busy.append(placer.place(first_attempt(other), A_DRAW, now_s=0.2))
    limit_s = 0.8 * prompt_s(Timing(), 16_000)
    request = structs.replace(request, service_level=structs.replace(CRITICAL, ttft_slo_s=limit_s))
    late = structs.replace(first_attempt(request), arrived_s=0.3)
    with pytest.raises(SloUnreachable) as caught:
        placer.place(late, A_DRAW, now_s=0.3)
    assert caught.value.retry_after_s is not None
    for placement in busy:
        placer.release(placement, now_s=2.0)
    again = placer.place(structs.replace(late, arrived_s=2.0), A_DRAW, now_s=2.0)
    assert again.decision.decode.rank.worker_id == 1


@given(st.lists(st.tuples(st.floats(0.001, 100.0), st.booleans(), st.floats(0.0, 100.0)), min_size=1))
def test_the_share_of_critical_work_is_that_of_work_by_its_age(
    placed: list[tuple[float, bool, float]],
) -> None:
    work, now_s = CriticalWork(), 0.0
    assert work.share == 0.0
    added: list[tuple[float, bool, float]] = []
    for work_s, is_critical, gap_s in placed:
        now_s += gap_s
        work.add(work_s, is_critical=is_critical, now_s=now_s)
        added.append((work_s, is_critical, now_s))
    weighed = [(work_s * 2.0 ** ((at_s - now_s) / HALF_LIFE_S), is_one) for work_s, is_one, at_s in added]
    share = sum(part for part, is_one in weighed if is_one) / sum(part for part, _ in weighed)
    assert work.share == pytest.approx(min(SHARE_MAX, share))


NUMBERS = st.integers(1, 3)
BOOKED = st.lists(st.tuples(NUMBERS, NUMBERS, st.integers(1, 4000)), max_size=12)
NEAR = RoutingConstraints(preferred_taints={Taint("near"): 2.0})
LINKS = LinkTable({}, Link(1e-4, 1e9))
AGGREGATED = RoutingSettings(cost="time")
JOINT = RoutingSettings(cost="time", pd_selection=PdSelection.JOINT, links=LINKS)


def pinned(request: GenerateRequest, prefill: int | None, decode: int) -> GenerateRequest:
    prefill_pin = None if prefill is None else Pin(WorkerId(prefill))
    return structs.replace(request, pin=Pin(WorkerId(decode)), prefill_pin=prefill_pin)


def is_late(placer: Placer, request: GenerateRequest) -> bool:
    try:
        placer.explain(request, A_DRAW, now_s=0.0)
    except SloUnreachable:
        return True
    return False


@given(BOOKED, st.sets(NUMBERS), st.floats(0.001, 0.5), st.booleans(), st.sampled_from([0.0, 0.5]))
@example(booked=[(1, 1, 3000)] * 3, preferred={1}, limit_s=0.1, are_pairs=False, temperature=0.0)
def test_a_request_is_late_only_where_it_is_late_at_every_worker(
    booked: list[tuple[int, int, int]],
    preferred: set[int],
    limit_s: float,
    are_pairs: bool,
    temperature: float,
) -> None:
    settings = JOINT if are_pairs else AGGREGATED
    placer = placer_of(settings=structs.replace(settings, temperature=temperature))
    pairs: list[tuple[int | None, int]] = []
    for number in range(1, 4):
        taints = ("near",) if number in preferred else ()
        if are_pairs:
            placer.fleet.join(card(number, Role.PREFILL, taints=taints))
            decode = card(number + 3, Role.DECODE, taints=taints)
            placer.fleet.join(structs.replace(decode, decode_only=True))
            pairs += [(number, other) for other in range(4, 7)]
        else:
            placer.fleet.join(card(number, taints=taints))
            pairs.append((None, number))
    for n_booked, (first, second, tokens) in enumerate(booked):
        other = generate_request(tokens=tokens, request_id=f"b{n_booked}")
        at = (first, second + 3) if are_pairs else (None, first)
        placer.place(first_attempt(pinned(other, *at)), A_DRAW, now_s=0.0)
    level = structs.replace(CRITICAL, ttft_slo_s=limit_s)
    request = structs.replace(generate_request(tokens=2000), service_level=level, constraints=NEAR)
    late = is_late(placer, request)
    assert late == all(is_late(placer, pinned(request, *pair)) for pair in pairs)
    try:
        placer.place(structs.replace(first_attempt(request), arrived_s=0.0), A_DRAW, now_s=0.0)
    except SloUnreachable:
        assert late

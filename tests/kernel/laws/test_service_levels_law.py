"""Which requests are refused because they would be late: the laws, and the share of critical work."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from kvrouter.core.constraints import RouterMode
from kvrouter.core.errors import Reason, SloUnreachable
from kvrouter.core.ids import DpRank, RequestId, Slot, WorkerId, WorkerRank
from kvrouter.core.requests import Leg, ServiceLevel
from kvrouter.kernel.placement.service_levels import HALF_LIFE_S, SHARE_MAX, CriticalWork, refuse_late
from kvrouter.kernel.routing.interface import Decision, Pick, Times

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


def is_refused(decision: Decision, level: ServiceLevel, share: float, limit_s: float) -> bool:
    try:
        refuse_late(decision, level, share, limit_s)
    except SloUnreachable:
        return True
    return False


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
    refuse_late(aggregated(times), OTHER, 0.25, 7.25)
    refuse_late(aggregated(times), CRITICAL, 0.25, 5.75)


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

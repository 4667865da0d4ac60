"""The log of decisions keeps the last ones, and no more than it is reported."""

from kvrouter.core.constraints import RouterMode
from kvrouter.core.ids import DpRank, RequestId, Slot, WorkerId, WorkerRank
from kvrouter.core.requests import Leg
from kvrouter.kernel.routing.interface import Decision, Pick
from kvrouter.router.model_router import ATTEMPTS_MAX, DecisionLog
from tests.testing.router_harness import MODEL


def decision(request_id: str, attempt: int = 0) -> Decision:
    pick = Pick(
        slot=Slot(0),
        rank=WorkerRank(WorkerId(1), DpRank(0)),
        leg=Leg.AGGREGATED,
        overlap_blocks=0,
        prefill_blocks=0.0,
        decode_blocks=0.0,
        transfer_blocks=0.0,
        multiplier=1.0,
        cost=0.0,
        candidates=1,
    )
    return Decision(request_id=RequestId(request_id), attempt=attempt, mode=RouterMode.KV, decode=pick)


def attempts(log: DecisionLog, request_id: str) -> list[tuple[float, int]] | None:
    kept = log.get(RequestId(request_id))
    return None if kept is None else [(each.decided_at_s, each.decision.attempt) for each in kept]


def test_every_attempt_of_a_request_is_kept_in_order() -> None:
    log = DecisionLog(requests_max=2)
    log.record(decision("a"), decided_at_s=1.0)
    log.record(decision("b"), decided_at_s=2.0)
    log.record(decision("a", 1), decided_at_s=3.0)
    assert attempts(log, "a") == [(1.0, 0), (3.0, 1)]
    assert attempts(log, "b") == [(2.0, 0)]
    assert attempts(log, MODEL) is None


def test_a_full_decision_log_drops_the_oldest_request() -> None:
    log = DecisionLog(requests_max=2)
    for at_s, request_id in enumerate("abac"):
        log.record(decision(request_id), decided_at_s=float(at_s))
    assert attempts(log, "a") is None
    assert attempts(log, "b") == [(1.0, 0)]
    assert attempts(log, "c") == [(3.0, 0)]


def test_a_request_keeps_only_its_last_attempts() -> None:
    log = DecisionLog(requests_max=1)
    for attempt in range(ATTEMPTS_MAX + 3):
        log.record(decision("a", attempt), decided_at_s=0.0)
    kept = attempts(log, "a")
    assert kept is not None
    assert [attempt for _, attempt in kept] == list(range(3, ATTEMPTS_MAX + 3))


def test_a_decision_log_of_size_zero_keeps_no_decision() -> None:
    log = DecisionLog(requests_max=0)
    log.record(decision("a"), decided_at_s=0.0)
    assert attempts(log, "a") is None


def test_reading_the_decision_log_gives_a_copy() -> None:
    log = DecisionLog(requests_max=1)
    log.record(decision("a"), decided_at_s=0.0)
    kept = log.get(RequestId("a"))
    assert kept is not None
    kept.clear()
    assert attempts(log, "a") == [(0.0, 0)]


def test_a_resumed_answer_keeps_the_time_of_its_first_token() -> None:
    log = DecisionLog(requests_max=2)
    log.record(decision("a"), decided_at_s=0.0)
    seen = log.seen(RequestId("a"))
    assert seen is not None
    seen.ttft_s, seen.cached_tokens = 0.5, 64
    log.record(decision("a", 1), decided_at_s=1.0)
    (last,) = log.latest(1)
    assert (last.decision.attempt, last.seen.ttft_s, last.seen.cached_tokens) == (1, 0.5, None)
    log.record(decision("a"), decided_at_s=2.0)  # a client's own retry under the same id
    assert log.latest(1)[0].seen.ttft_s is None

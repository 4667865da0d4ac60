"""The journey's table: whatever happens, a request ends once, is sent at most three times, leaves nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvrouter.core.errors import KvrouterError, NoEligibleWorker, RetryBodiesFull, WorkerFailed
from kvrouter.core.ids import WorkerId
from kvrouter.core.requests import FinishReason, Leg, Sampling
from kvrouter.kernel.journey import (
    Abandon,
    ClientLeft,
    Command,
    End,
    Fail,
    Finished,
    FirstTokens,
    Input,
    Journey,
    JourneyError,
    KvLost,
    LegLost,
    LegRefused,
    NotPlaced,
    Place,
    Placed,
    PrefillDone,
    RetryPlan,
    SendDecode,
    SendPrefill,
    Shape,
    State,
)

REFUSED = NoEligibleWorker("nobody", refusals={})
GREEDY = Sampling(max_tokens=8, temperature=0.0)
SEEDED = Sampling(max_tokens=8, temperature=1.0, seed=7)


def lost(worker: int, leg: Leg = Leg.DECODE) -> LegLost:
    return LegLost(leg, WorkerId(worker), "connection reset")


def kinds(commands: list[Command]) -> list[str]:
    return [type(command).__name__ for command in commands]


def streaming(sampling: Sampling = GREEDY, tokens: int = 3) -> Journey:
    journey = Journey(sampling)
    journey.begin()
    journey.handle(Placed(Shape.AGGREGATED))
    journey.handle(FirstTokens())
    journey.generated.extend(range(tokens))
    return journey


def test_a_synchronous_pair_hands_the_prefill_answer_to_decode() -> None:
    journey = Journey(GREEDY)
    assert journey.begin() == [Place(0, frozenset())]
    assert journey.handle(Placed(Shape.SYNCHRONOUS)) == [SendPrefill()]
    assert journey.handle(PrefillDone(WorkerId(1), {"room": 5})) == [SendDecode({"room": 5})]
    assert journey.handle(FirstTokens()) == []
    assert journey.handle(Finished(FinishReason.STOP)) == [Abandon("finished"), End(FinishReason.STOP)]


def test_a_bootstrap_pair_sends_both_legs_at_once() -> None:
    journey = Journey(GREEDY)
    assert journey.handle(Placed(Shape.BOOTSTRAP)) == [SendPrefill(), SendDecode(None)]


def test_a_prefill_answer_without_transfer_params_excludes_its_worker() -> None:
    journey = Journey(GREEDY)
    journey.handle(Placed(Shape.SYNCHRONOUS))
    commands = journey.handle(PrefillDone(WorkerId(4), None))
    again = (RetryPlan.USUAL, RetryPlan.AGGREGATED)
    assert commands[-1] == Place(1, frozenset({WorkerId(4)}), frozenset(), again)


def failing(worker: int) -> LegLost:
    return LegLost(Leg.PREFILL, WorkerId(worker), "the engine answered 500", taken=True)


def test_a_request_prefers_aggregated_after_two_failed_prefills() -> None:
    journey = Journey(SEEDED, redispatches_max=5)
    places = []
    for event in (failing(1), failing(2)):
        journey.handle(Placed(Shape.SYNCHRONOUS))
        places.append(journey.handle(event)[-1])
    first, both = frozenset({WorkerId(1)}), frozenset({WorkerId(1), WorkerId(2)})
    assert places == [
        Place(1, first, frozenset(), (RetryPlan.USUAL, RetryPlan.AGGREGATED)),
        Place(2, both, frozenset(), (RetryPlan.AGGREGATED, RetryPlan.USUAL)),
    ]


def test_the_last_try_after_a_failed_prefill_prefers_aggregated() -> None:
    journey = Journey(SEEDED, redispatches_max=1)
    journey.handle(Placed(Shape.SYNCHRONOUS))
    last = journey.handle(failing(1))[-1]
    assert last == Place(1, frozenset({WorkerId(1)}), frozenset(), (RetryPlan.AGGREGATED, RetryPlan.USUAL))


def test_a_refused_prefill_prefers_aggregated_and_costs_no_try() -> None:
    journey = Journey(SEEDED, redispatches_max=0)
    journey.handle(Placed(Shape.SYNCHRONOUS))
    again = journey.handle(LegRefused(REFUSED))
    assert again == [
        Abandon(REFUSED.code),
        Place(1, frozenset(), frozenset(), (RetryPlan.AGGREGATED, RetryPlan.USUAL)),
    ]
    journey.handle(Placed(Shape.SYNCHRONOUS))
    assert journey.handle(LegRefused(WorkerFailed("other")))[-1] == Fail(REFUSED)


def test_a_separate_prefill_reports_its_refusal_to_the_caller() -> None:
    journey = Journey(SEEDED, prefill_alone=True)
    journey.handle(Placed(Shape.SYNCHRONOUS))
    assert journey.handle(failing(1))[-1] == Place(1, frozenset({WorkerId(1)}))
    journey.handle(Placed(Shape.SYNCHRONOUS))
    assert journey.handle(LegRefused(REFUSED))[-1] == Fail(REFUSED)


def test_a_worker_lost_before_the_first_token_is_replaced_and_excluded() -> None:
    journey = Journey(SEEDED)
    journey.handle(Placed(Shape.AGGREGATED))
    assert kinds(journey.handle(lost(1))) == ["Abandon", "Place"]
    journey.handle(Placed(Shape.AGGREGATED))
    assert journey.handle(lost(2))[-1] == Place(2, frozenset({WorkerId(1), WorkerId(2)}))


def kv_lost(sender: int) -> KvLost:
    return KvLost(WorkerId(sender), WorkerId(9), "connection reset")


def test_lost_kv_is_prefilled_again_without_excluding_workers() -> None:
    journey = Journey(SEEDED)
    journey.handle(Placed(Shape.BOOTSTRAP))
    again, whole = frozenset({WorkerId(1)}), frozenset({WorkerId(1), WorkerId(2)})
    assert journey.handle(kv_lost(1)) == [
        Abandon("worker 9 did not get its KV: connection reset"),
        Place(1, frozenset(), again, (RetryPlan.OTHER_PREFILL, RetryPlan.USUAL, RetryPlan.AGGREGATED)),
    ]
    journey.handle(Placed(Shape.BOOTSTRAP))
    last = journey.handle(kv_lost(2))[-1]
    assert last == Place(
        2, frozenset(), whole, (RetryPlan.AGGREGATED, RetryPlan.OTHER_PREFILL, RetryPlan.USUAL)
    )
    journey.handle(Placed(Shape.AGGREGATED))
    assert kinds(journey.handle(lost(9))) == ["Abandon", "Fail"]


def test_the_last_try_after_a_kv_loss_prefers_aggregated() -> None:
    journey = Journey(SEEDED)
    for event in (lost(8), kv_lost(1)):
        journey.handle(Placed(Shape.BOOTSTRAP))
        commands = journey.handle(event)
    ways = (RetryPlan.AGGREGATED, RetryPlan.OTHER_PREFILL, RetryPlan.USUAL)
    assert commands[-1] == Place(2, frozenset({WorkerId(8)}), frozenset({WorkerId(1)}), ways)


def test_a_second_kv_loss_with_tries_left_prefers_an_untried_prefill_worker() -> None:
    journey = Journey(SEEDED, redispatches_max=5)
    for sender in (1, 1):
        journey.handle(Placed(Shape.BOOTSTRAP))
        commands = journey.handle(kv_lost(sender))
    assert isinstance(commands[-1], Place)
    assert commands[-1].plans == (RetryPlan.OTHER_PREFILL, RetryPlan.AGGREGATED, RetryPlan.USUAL)


def test_a_prompt_that_kills_workers_is_tried_three_times_at_most() -> None:
    journey = Journey(GREEDY)
    for worker in range(3):
        journey.handle(Placed(Shape.AGGREGATED))
        commands = journey.handle(lost(worker))
    (failed,) = [command for command in commands if isinstance(command, Fail)]
    assert isinstance(failed.error, WorkerFailed)
    assert "try 3 of 3" in str(failed.error)


def test_workers_that_shut_down_are_replaced_and_cost_no_try() -> None:
    journey = Journey(GREEDY, redispatches_max=1)
    for worker, is_leaving in enumerate((True, False, True, True)):
        journey.handle(Placed(Shape.AGGREGATED))
        again = journey.handle(replace(lost(worker), shutting_down=is_leaving))[-1]
        assert again == Place(worker + 1, frozenset(WorkerId(each) for each in range(worker + 1)))
    journey.handle(Placed(Shape.AGGREGATED))
    failed = journey.handle(lost(4))[-1]
    assert isinstance(failed, Fail)
    assert "try 2 of 2" in str(failed.error)


def test_a_prefill_worker_that_shuts_down_leaves_the_last_try_to_a_pair() -> None:
    journey = Journey(SEEDED, redispatches_max=1)
    journey.handle(Placed(Shape.SYNCHRONOUS))
    again = journey.handle(replace(lost(1, Leg.PREFILL), shutting_down=True))[-1]
    plans = (RetryPlan.USUAL, RetryPlan.AGGREGATED)
    assert again == Place(1, frozenset({WorkerId(1)}), frozenset(), plans)


@pytest.mark.parametrize(
    ("fields", "error"),
    [({"full": True}, RetryBodiesFull), ({"shutting_down": True}, RetryBodiesFull), ({}, WorkerFailed)],
)
def test_a_dropped_body_that_no_worker_took_may_be_sent_again(
    fields: dict[str, bool], error: type[KvrouterError]
) -> None:
    journey = Journey(GREEDY)
    journey.handle(Placed(Shape.AGGREGATED))
    journey.can_be_sent = False
    (_, failed) = journey.handle(replace(lost(1), **fields))
    assert isinstance(failed, Fail)
    assert type(failed.error) is error


def test_a_resumable_request_is_placed_again_and_others_fail() -> None:
    journey = streaming(GREEDY)
    assert kinds(journey.handle(lost(1))) == ["Abandon", "Place"]
    assert (journey.remaining_tokens, journey.resumes) == (5, 1)
    assert kinds(streaming(SEEDED).handle(lost(1))) == ["Abandon", "Fail"]


def test_a_worker_lost_after_the_last_token_ends_the_request_normally() -> None:
    assert streaming(SEEDED, tokens=8).handle(lost(1)) == [
        Abandon("connection reset"),
        End(FinishReason.LENGTH),
    ]


def test_an_answer_that_is_not_plain_fails_despite_all_its_tokens() -> None:
    journey = streaming(GREEDY, tokens=8)
    journey.is_plain = False
    (_, failed) = journey.handle(lost(1))
    assert isinstance(failed, Fail)
    assert "several answers" in str(failed.error)


def test_a_prefill_worker_lost_after_the_first_token_is_ignored() -> None:
    journey = streaming(SEEDED)
    assert journey.handle(lost(1, Leg.PREFILL)) == []
    assert journey.state is State.STREAMING


def test_an_impossible_input_raises_journey_error() -> None:
    with pytest.raises(JourneyError, match="FirstTokens cannot happen while ROUTING"):
        Journey(GREEDY).handle(FirstTokens())


def possible(state: State) -> st.SearchStrategy[Input]:
    """What may happen in ``state``, as a driver would see it."""
    legs = st.builds(
        LegLost,
        st.sampled_from([Leg.PREFILL, Leg.DECODE]),
        st.integers(0, 5),
        st.just("gone"),
        shutting_down=st.booleans(),
    )
    ends: list[st.SearchStrategy[Input]] = [st.just(ClientLeft("closed"))]
    if state is State.ROUTING:
        ends += [st.builds(Placed, st.sampled_from(Shape)), st.just(NotPlaced(REFUSED))]
    elif state is State.PREFILLING:
        ends += [
            legs,
            st.builds(PrefillDone, st.integers(0, 5), st.sampled_from([None, {"room": 1}])),
            st.just(LegRefused(REFUSED)),
        ]
    elif state is State.DECODING:
        kv = st.builds(KvLost, st.integers(0, 5), st.integers(6, 9), st.just("no way"))
        ends += [legs, kv, st.just(FirstTokens()), st.just(Finished(FinishReason.STOP))]
    else:
        ends += [legs, st.just(Finished(FinishReason.STOP)), st.just(LegRefused(REFUSED))]
    return st.one_of(ends)


@given(st.data(), st.sampled_from([GREEDY, SEEDED]))
def test_a_finished_journey_has_at_most_one_end_and_limited_placements(
    data: st.DataObject, sampling: Sampling
) -> None:
    journey = Journey(sampling)
    commands = journey.begin()
    sent = 0
    left = False
    events: list[Input] = []
    for _ in range(30):
        if journey.state is State.DONE:
            break
        event = data.draw(possible(journey.state))
        events.append(event)
        left = isinstance(event, ClientLeft)
        if journey.state is State.STREAMING:
            journey.generated.extend(range(data.draw(st.integers(0, max(0, journey.remaining_tokens)))))
        new = journey.handle(event)
        if any(isinstance(command, SendDecode | SendPrefill) for command in new):
            sent += 1
        names = kinds(new)
        if "Place" in names or "End" in names or "Fail" in names:
            assert names.index("Abandon") == 0, "what an attempt holds goes before anything else happens"
        commands += new
    else:
        return
    names = kinds(commands)
    is_refused = any(isinstance(event, LegRefused) for event in events)
    n_leaving = sum(isinstance(event, LegLost) and event.shutting_down for event in events)
    assert names.count("Place") <= 3 + is_refused + n_leaving, "these cost no try"
    assert names.count("End") + names.count("Fail") == (0 if left else 1)
    assert names[-1] in {"Abandon", "End", "Fail"}
    places = [command for command in commands if isinstance(command, Place)]
    assert [place.attempt for place in places] == list(range(len(places)))
    assert all(RetryPlan.USUAL in place.plans for place in places)
    blamed = {event.worker_id for event in events if isinstance(event, LegLost | PrefillDone)}
    senders = {event.prefill_worker_id for event in events if isinstance(event, KvLost)}
    assert senders >= places[-1].kv_lost_from
    if RetryPlan.OTHER_PREFILL in places[-1].plans:
        assert places[-1].kv_lost_from != frozenset()
    prefills = [event for event in events if isinstance(event, LegLost) and event.leg is Leg.PREFILL]
    no_params = any(isinstance(event, PrefillDone) and event.params is None for event in events)
    if RetryPlan.AGGREGATED in places[-1].plans:
        assert senders or prefills or no_params or is_refused, "one worker alone is for prefills that failed"
    for place in places:
        assert place.excluded <= blamed, "nobody is excluded for KV that got lost on its way"
    assert journey.handle(Finished(FinishReason.STOP)) == []

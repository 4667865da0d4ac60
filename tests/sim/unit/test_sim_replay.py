"""A replay: what one computes by hand comes out, and nothing is left over."""

from array import array

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrouter.core.errors import ConfigError
from kvrouter.core.ids import Slot
from kvrouter.core.timing import Timing
from kvrouter.kernel.fleet.columns import FloatColumn
from kvrouter.kernel.routing.interface import PickInput
from kvrouter.sim.replay.dispatch import ByTimeStamp, ClosedLoop
from kvrouter.sim.replay.percentiles import percentile
from kvrouter.sim.replay.sim_fleet import SimFleet
from kvrouter.sim.replay.simulation import check_room, size_of
from kvrouter.sim.replay.summary import Objective, interval, summarize
from kvrouter.sim.replay.timetable import AddEvent, DieEvent, JoinEvent
from kvrouter.sim.rules.balancers import RoundRobin
from kvrouter.sim.rules.registry import RULES, parse_rule
from kvrouter.sim.traces.trace_request import TraceInfo, TraceRequest, Wait
from tests.testing.replays import TWO_ZONES, by_number, fleet, replayed, row

TIMING = Timing()


def test_single_request_takes_the_time_of_the_engines_timing() -> None:
    (outcome,) = replayed([row(0, 5.0, [1, 2, 3], output_tokens=3)]).outcomes
    prefill_s = TIMING.prefill_ms(192) / 1e3
    assert outcome.arrived_s == 5.0
    assert outcome.ttft_s == pytest.approx(prefill_s)
    assert outcome.itl_s == pytest.approx(TIMING.decode_ms(4 / 16_384) / 1e3, rel=1e-3)
    assert (outcome.generated_tokens, outcome.cached_tokens, outcome.error) == (3, 0, "")


def test_cached_prefix_is_found_by_the_router_and_not_computed_again() -> None:
    first, second = by_number(replayed([row(0, 0.0, [1, 2, 3]), row(1, 10.0, [1, 2, 9])]))
    assert (first.cached_tokens, first.ceiling_tokens) == (0, 0)
    assert (second.predicted_tokens, second.cached_tokens, second.ceiling_tokens) == (128, 128, 128)
    assert second.decode == first.decode
    assert second.ttft_s == pytest.approx(TIMING.prefill_ms(64) / 1e3)


def test_decode_waits_for_the_kv_transfer_over_the_link() -> None:
    # 192 tokens of 131,072 bytes over 13,107,200 bytes a second: 1.92 s, after the prefill.
    (outcome,) = replayed(
        [row(0, 0.0, [1, 2, 3])], fleet(f"kv_transfer: {{domain: zone}}{TWO_ZONES}")
    ).outcomes
    prefill_s = TIMING.prefill_ms(192) / 1e3
    assert outcome.ttft_s == pytest.approx(prefill_s + 1.92 + TIMING.decode_ms(0.0) / 1e3, rel=1e-2)
    assert outcome.prefill is not None
    assert outcome.decode == outcome.prefill + 1
    assert not outcome.crosses


def test_required_refuses_in_a_zone_without_decode_and_fallback_crosses() -> None:
    rows = [row(0, 0.0, [1, 2, 3]), row(1, 20.0, [1, 2, 3])]
    dies = [
        DieEvent(at_s=10.0, group="da"),
        DieEvent(at_s=10.0, group="pb"),
    ]
    required = replayed(rows, fleet(f"kv_transfer: {{domain: zone}}{TWO_ZONES}"), timetable=dies)
    assert [outcome.error for outcome in by_number(required)] == ["", "no_eligible_worker"]
    assert by_number(required)[1].reason == "domain_mismatch"
    fallback = replayed(
        rows, fleet(f"kv_transfer: {{domain: zone, enforcement: fallback}}{TWO_ZONES}"), timetable=dies
    )
    last = by_number(fallback)[1]
    assert (last.error, last.crosses) == ("", True)
    carried = {(pair.src_domain, pair.dst_domain): c.arrived_bytes for pair, c in fallback.carried.items()}
    assert carried["a", "b"] == 192 * 131_072


def test_request_of_a_dying_worker_is_retried_and_a_rejoined_one_is_empty() -> None:
    rows = [row(0, 0.0, [1, 2], output_tokens=400), row(1, 30.0, [1, 2])]
    dies = [DieEvent(at_s=1.0), JoinEvent(at_s=1.0)]
    one = replayed(rows, fleet("workers: [{name: w}]"), timetable=dies)
    assert [outcome.error for outcome in by_number(one)] == ["no_eligible_worker", ""]
    assert by_number(one)[1].cached_tokens == 0
    two = fleet("workers: [{name: w1}, {name: w2}]")
    moved = [
        by_number(replayed(rows, two, timetable=[DieEvent(at_s=1.0, group=group)]))[0]
        for group in ("w1", "w2")
    ]
    assert [(outcome.error, outcome.generated_tokens) for outcome in moved] == [("", 400), ("", 400)]
    assert sorted(outcome.attempts for outcome in moved) == [1, 2]


def test_prefill_worker_restarted_after_its_transfer_fails_no_request() -> None:
    # Its prefill is done and its KV fetched when it dies; the answer goes on without it.
    rows = [row(0, 0.0, [1, 2], output_tokens=2_000)]
    again = [DieEvent(at_s=5.0, group="pa"), JoinEvent(at_s=6.0, group="pa")]
    file = fleet(f"kv_transfer: {{domain: zone}}{TWO_ZONES}".replace("{zone: b}", "{zone: a}"))
    both = [*again, *(type(event)(at_s=event.at_s + 0.1, group="pb") for event in again)]
    (outcome,) = replayed(rows, file, timetable=both).outcomes
    assert (outcome.error, outcome.generated_tokens, outcome.attempts) == ("", 2_000, 1)


def test_closed_loop_turns_follow_answers_after_their_think_time() -> None:
    rows = [
        row(0, 0.0, [1, 2], session="s"),
        row(1, 0.5, [1, 2, 3], session="s", waits=(Wait(0, 7.0),)),
        row(2, 1.0, [4], session="t"),
    ]
    first, second, third = by_number(replayed(rows, dispatch=ClosedLoop()))
    assert first.last_s is not None
    assert second.arrived_s == first.last_s + 7.0
    assert third.arrived_s == 1.0
    by_stamp = by_number(replayed(rows, dispatch=ByTimeStamp(2.0)))
    assert [outcome.arrived_s for outcome in by_stamp] == [0.0, 0.25, 0.5]


def test_request_that_waits_for_several_follows_the_last_of_them() -> None:
    rows = [
        row(0, 0.0, [1], output_tokens=2),
        row(1, 0.0, [2], output_tokens=400),
        row(2, 0.0, [3], waits=(Wait(0, 1.0), Wait(1, 0.25))),
        row(3, 0.0, [4], waits=(Wait(0, 500.0), Wait(1, 0.25))),
        row(4, 0.0, [5], waits=(Wait(1, 2.0, for_arrival=True),)),
        row(5, 0.0, [6], waits=(Wait(0, 1.0),), not_before_s=900.0),
    ]
    short, long, last, longest, meanwhile, late = by_number(replayed(rows, dispatch=ClosedLoop()))
    assert short.last_s is not None
    assert long.last_s is not None
    assert last.arrived_s == long.last_s + 0.25 > short.last_s + 1.0
    assert longest.arrived_s == short.last_s + 500.0
    assert meanwhile.arrived_s == 2.0 < long.last_s
    assert late.arrived_s == 900.0
    by_stamp = by_number(replayed(rows, dispatch=ByTimeStamp()))
    assert {outcome.arrived_s for outcome in by_stamp} == {0.0}


@st.composite
def workflows(draw: st.DrawFn) -> list[TraceRequest]:
    """Requests that wait for some of those before them."""
    rows: list[TraceRequest] = []
    for number in range(draw(st.integers(1, 10))):
        others = draw(st.sets(st.integers(0, number - 1), max_size=4)) if number else set()
        waits = tuple(
            Wait(other, draw(st.sampled_from([0.0, 0.125, 30.0])), draw(st.booleans())) for other in others
        )
        rows.append(
            row(
                number,
                0.5 * number,
                [number, number + 1],
                output_tokens=draw(st.integers(1, 300)),
                waits=waits,
                not_before_s=draw(st.sampled_from([0.0, 20.0])) if waits else 0.0,
            )
        )
    return rows


@given(rows=workflows(), dies=st.booleans())
@settings(max_examples=50)
def test_closed_loop_request_never_arrives_before_the_last_one_it_waits_for(
    rows: list[TraceRequest], dies: bool
) -> None:
    # Where the fleet dies, requests fail; those who wait for them come nevertheless.
    timetable = [DieEvent(at_s=2.0, group="w")] if dies else []
    result = replayed(rows, dispatch=ClosedLoop(), timetable=timetable)
    outcomes = by_number(result)
    assert [outcome.number for outcome in outcomes] == [each.number for each in rows]
    for each, outcome in zip(rows, outcomes, strict=True):
        earliest_s = [each.not_before_s if each.waits else each.at_s]
        for wait in each.waits:
            other = outcomes[wait.number]
            if wait.for_arrival:
                earliest_s.append(other.arrived_s + wait.think_s)
            elif not other.error:
                assert other.last_s is not None
                earliest_s.append(other.last_s + wait.think_s)
        if any(outcomes[wait.number].error for wait in each.waits):
            assert outcome.arrived_s >= max(earliest_s)
        else:
            assert outcome.arrived_s == max(earliest_s)


def test_closed_loop_of_a_trace_without_sessions_is_refused() -> None:
    with pytest.raises(ConfigError, match="no sessions"):
        ClosedLoop().check(TraceInfo("Mooncake", 512, has_sessions=False))
    ClosedLoop().check(TraceInfo("Mooncake with sessions", 512, has_sessions=True, has_times=False))


def test_dispatch_by_time_stamp_of_a_trace_without_times_is_refused() -> None:
    with pytest.raises(ConfigError, match="--dispatch closed"):
        ByTimeStamp().check(TraceInfo("Mooncake with sessions", 512, has_sessions=True, has_times=False))
    ByTimeStamp().check(TraceInfo("Mooncake", 512, has_sessions=False))


def test_queued_requests_are_admitted_when_load_falls_or_refused_on_timeout() -> None:
    settings = "router: {active_prefill_tokens_threshold: 64, admission_queue_max: 8, admission_wait_s: 60}\n"
    rows = [row(n, 0.001 * n, [10 * n, 10 * n + 1, 10 * n + 2], output_tokens=2) for n in range(6)]
    waited = by_number(replayed(rows, fleet(settings + "workers: [{name: w}]")))
    assert [outcome.error for outcome in waited] == [""] * 6
    assert all(o.placed_s is not None and o.placed_s > o.arrived_s for o in waited[2:])
    short = settings.replace("admission_wait_s: 60", "admission_wait_s: 0.001")
    refused = by_number(replayed(rows, fleet(short + "workers: [{name: w}]")))
    assert "all_workers_busy" in {outcome.error for outcome in refused}
    assert {outcome.reason for outcome in refused if outcome.error} == {"busy"}


def test_shortest_waiting_prompt_goes_first_and_is_passed_by_none_later() -> None:
    settings = "{active_prefill_tokens_threshold: 0, admission_queue_max: 8, admission_wait_s: 60"
    rows = [
        row(0, 0.0, [*range(64)]),
        row(1, 0.001, [*range(100, 132)]),
        row(2, 0.002, [200]),
        row(3, 0.003, [300, 301]),
    ]

    def order(policy: str) -> list[int]:
        file = fleet(f"router: {settings}, router_queue_policy: {policy}}}\nworkers: [{{name: w}}]")
        outcomes = by_number(replayed(rows, file))
        return sorted(range(4), key=lambda number: outcomes[number].placed_s or 0.0)

    assert order("fcfs") == order("deadline") == [0, 1, 2, 3]
    assert order("shortest") == [0, 2, 3, 1]


def test_request_timeout_ends_a_request() -> None:
    rows = [row(0, 0.0, [1], output_tokens=1_000), row(1, 100.0, [2])]
    file = fleet("router: {request_timeout_s: 2.0}\nworkers: [{name: w}]")
    slow, other = by_number(replayed(rows, file))
    assert slow.error == "deadline_exceeded"
    assert slow.ttft_s is not None
    assert other.error == ""


def test_rule_knows_the_timing_of_each_engine_or_a_given_one() -> None:
    slow = "{prefill_base: 99.0}"
    file = fleet(f"workers: [{{name: a, engine: {{timing: {slow}}}}}, {{name: b, replicas: 2}}]")

    def prefill_bases(timing: Timing | None) -> list[float]:
        sim = SimFleet(
            file, config=file.router, rule=None, seed=0, call_soon=lambda call: call(), timing=timing
        )
        return [sim.loads.timings[number].prefill_base for number in sim.loads.timing[:3].tolist()]

    assert prefill_bases(None) == [99.0, TIMING.prefill_base, TIMING.prefill_base]
    assert prefill_bases(Timing(prefill_base=7.0)) == [7.0] * 3


def test_request_too_large_for_any_engine_is_found_before_the_replay() -> None:
    file = fleet("workers: [{name: w, engine: {total_kv_blocks: 4}}]")
    sim = SimFleet(file, config=file.router, rule=None, seed=0, call_soon=lambda call: call())
    check_room(row(0, 0.0, [1, 2, 3]), sim)
    with pytest.raises(ConfigError, match=r"^request 1: 256 tokens and 4 more") as refused:
        check_room(size_of([row(0, 0.0, [1]), row(1, 0.0, [1, 2, 3, 4])]).longest, sim)
    assert refused.value.param == "total_kv_blocks"


def test_prompt_beyond_the_context_is_refused_with_the_needed_length() -> None:
    file = fleet("workers: [{name: w}]")
    file = file.model_copy(update={"models": (file.models[0].model_copy(update={"context_length": 200}),)})
    sim = SimFleet(file, config=file.router, rule=None, seed=0, call_soon=lambda call: call())
    with pytest.raises(ConfigError, match=r"models\[0\]\.context_length .* to 260 or more") as refused:
        check_room(row(0, 0.0, [1, 2, 3, 4]), sim)
    assert refused.value.param == "context_length"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("workers: [{name: w, engine: {kind: vllm, url: 'http://x:1'}}]", "workers[0].engine.kind"),
        ("workers: [{name: w}]", "block_size"),
    ],
)
def test_fleet_that_cannot_be_replayed_is_refused_by_field(text: str, named: str) -> None:
    with pytest.raises(ConfigError) as refused:
        replayed([row(0, 0.0, [1])], fleet(text, block_size=48 if named == "block_size" else 64))
    assert refused.value.param == named


ROWS = st.lists(
    st.tuples(
        st.floats(0.0, 3.0),
        st.lists(st.integers(0, 4), min_size=1, max_size=6),
        st.integers(1, 90),
        st.sampled_from(["", "s", "t"]),
    ),
    min_size=1,
    max_size=25,
)


def made(drawn: list[tuple[float, list[int], int, str]]) -> list[TraceRequest]:
    ordered = sorted(drawn, key=lambda each: each[0])
    return [
        row(n, at_s, pieces, output_tokens=output, session=session)
        for n, (at_s, pieces, output, session) in enumerate(ordered)
    ]


@given(drawn=ROWS, policy=st.sampled_from(["kvrouter", *RULES]), seed=st.integers(0, 3), pairs=st.booleans())
@settings(max_examples=60)
def test_any_rule_serves_every_request_and_repeats_with_the_same_seed(
    drawn: list[tuple[float, list[int], int, str]], policy: str, seed: int, pairs: bool
) -> None:
    rows = made(drawn)
    file = fleet(f"kv_transfer: {{domain: zone}}{TWO_ZONES}") if pairs else fleet()
    runs = [
        replayed(rows, file, rule=None if policy == "kvrouter" else parse_rule(policy), seed=seed)
        for _ in range(2)
    ]
    assert by_number(runs[0]) == by_number(runs[1])
    for outcome in runs[0].outcomes:
        assert outcome.error == ""
        assert outcome.generated_tokens == outcome.output_tokens
        assert outcome.cached_tokens <= outcome.input_tokens
        assert not outcome.crosses
    assert len(runs[0].outcomes) == len(rows)


@given(drawn=ROWS)
@settings(max_examples=25)
def test_shared_pieces_are_reused_at_any_block_size(
    drawn: list[tuple[float, list[int], int, str]],
) -> None:
    rows = made(drawn)
    ceilings = []
    for block_size in (16, 64, 128):
        outcomes = by_number(replayed(rows, fleet(block_size=block_size)))
        ceilings.append([outcome.ceiling_tokens for outcome in outcomes])
        assert all(outcome.cached_tokens <= outcome.ceiling_tokens for outcome in outcomes)
    small, middle, large = ceilings
    assert small == middle
    assert all(one // 128 * 128 == other for one, other in zip(middle, large, strict=True))


def test_summary_figures_are_those_of_the_outcomes() -> None:
    rows = [row(0, 0.0, [1, 2, 3], output_tokens=3), row(1, 50.0, [1, 2, 9], output_tokens=3)]
    summary = summarize(replayed(rows), Objective(ttft_s=0.018, itl_s=1.0))
    assert (summary.requests, summary.completed, summary.good_share) == (2, 2, 0.5)
    assert summary.cached_share == pytest.approx(128 / 384)
    assert summary.ceiling_share == summary.cached_share
    assert sum(part.requests for part in summary.parts) == 2
    assert (len(summary.ttft_ms.quantiles), summary.ttft_ms.quantiles[100]) == (101, summary.ttft_ms.max)
    first, last = summary.parts[0], summary.parts[-1]
    assert first.ceiling_share == 0.0
    assert last.ceiling_share == pytest.approx(128 / 192)
    assert (first.failed, first.crossing, first.imbalance) == (0, 0, 2.0)
    assert last.e2e_ms == summary.e2e_ms.quantiles[0]
    assert summary.imbalance == 2.0
    assert (summary.arrivals_s, summary.good_per_s) == (50.0, 1 / 50.0)
    assert 50.0 < summary.duration_s < 51.0
    with pytest.raises(ConfigError, match="ttft_s"):
        Objective(ttft_s=float("nan"))


def test_goodput_is_by_the_time_of_arrivals_however_long_answers_take() -> None:
    quick, slow = (
        summarize(
            replayed([row(number, float(number), [number], output_tokens=tokens) for number in range(3)]),
            Objective(ttft_s=60.0, itl_s=60.0),
        )
        for tokens in (2, 2_000)
    )
    assert quick.duration_s < slow.duration_s / 2
    assert quick.good_per_s == slow.good_per_s == 3 / 2.0
    at_once = summarize(replayed([row(0, 0.0, [1]), row(1, 0.0, [2])]), Objective())
    assert at_once.good_per_s is None


@given(st.lists(st.floats(0.0, 1e6), max_size=250), st.integers(1, 99))
def test_percentile_exists_only_if_a_sample_lies_beyond_it(values: list[float], percent: int) -> None:
    found = percentile(np.array(values), percent)
    if len(values) * (100 - percent) < 100:
        assert found is None
    else:
        assert found is not None
        assert min(values) <= found <= max(values)


def test_interrupted_or_failed_requests_make_times_those_of_survivors() -> None:
    whole = summarize(replayed([row(0, 0.0, [1]), row(1, 1.0, [2])]), Objective())
    assert not whole.has_survivors
    assert msgspec.structs.replace(whole, is_whole=False).has_survivors
    assert msgspec.structs.replace(whole, completed=1).has_survivors


def test_imbalance_of_a_part_counts_workers_that_compute_nothing() -> None:
    rows = [row(0, 0.0, [1, 2]), row(1, 0.1, [3, 4]), row(2, 50.0, [5, 6])]
    summary = summarize(replayed(rows), Objective())
    assert summary.imbalance == pytest.approx(4 / 3)
    assert (summary.parts[0].imbalance, summary.parts[-1].imbalance) == (1.0, 2.0)
    assert summary.parts[1].imbalance is None


def test_idle_workers_raise_the_imbalance_and_decode_workers_do_not() -> None:
    one_zone = TWO_ZONES.replace("- {name: db, role: decode, domains: {zone: b}}\n", "")
    rows = [row(number, 10.0 * number, [number]) for number in range(3)]
    pairs = fleet(f"kv_transfer: {{domain: zone}}{one_zone}")
    assert summarize(replayed(rows, pairs), Objective()).imbalance == 2.0
    later = [AddEvent(at_s=25.0, group="w"), DieEvent(at_s=26.0, worker=1)]
    one = fleet("workers: [{name: w}]")
    assert summarize(replayed(rows, one), Objective()).imbalance == 1.0
    assert summarize(replayed(rows, one, timetable=later), Objective()).imbalance == 2.0


class Listening(RoundRobin):
    """A rule that keeps whose decisions it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[tuple[str, str]] = []

    def pick(self, cost: FloatColumn, given: PickInput) -> Slot:
        request_id = given.request.request_id
        self.heard.append((request_id, self.gateway.session_of(request_id)))
        return Slot(int(given.allowed[0]))


def test_rule_gets_the_session_of_the_request_it_decides_about() -> None:
    long = [row(n, n / 10, [n], output_tokens=400, session=name) for n, name in enumerate("stu")]
    rule = Listening()
    result = replayed(long, rule=rule, timetable=[DieEvent(at_s=1.0, worker=1)])
    assert [outcome.attempts for outcome in by_number(result)] == [2, 2, 2]
    assert rule.heard == [(f"r{n}", name) for n, name in enumerate("stu")] * 2


def test_interval_is_a_95_percent_students_t_interval() -> None:
    found = interval([1.0, 2.0, 3.0])
    assert found.mean == 2.0
    assert found.within == pytest.approx(4.3027 * (1.0 / 3.0) ** 0.5, rel=1e-4)
    assert interval([0.0, 2.0] * 10).within == pytest.approx(2.093 * (20 / 19 / 20) ** 0.5, rel=1e-3)
    assert interval([5.0]).within == 0.0


def test_pieces_of_a_request_are_an_array() -> None:
    assert row(0, 0.0, [1, 2]).pieces == array("Q", [1, 2])


def test_request_that_both_engines_of_a_pair_refuse_is_refused() -> None:
    full = "engine: {max_num_seqs: 1, max_waiting_seqs: 1}"
    pair = f"- {{name: p, role: prefill, {full}}}\n- {{name: d, role: decode, {full}}}\n"
    rows = [row(number, 0.001 * number, [number]) for number in range(40)]
    errors = [outcome.error for outcome in by_number(replayed(rows, fleet(f"workers:\n{pair}")))]
    assert set(errors) == {"", "all_workers_busy"}


def test_requests_in_prefill_when_their_pair_is_refused_are_answered() -> None:
    file = fleet(
        "workers: [{name: p, role: prefill, engine: {handshake: old, handoff: synchronous}}, "
        "{name: d, role: decode, engine: {handshake: new}}]"
    )
    rows = [row(number, 1e-4 * number, range(100 * number, 100 * number + 100)) for number in range(8)]
    outcomes = replayed(rows, file).outcomes
    assert {(each.error, each.prefill, each.generated_tokens) for each in outcomes} == {("", None, 4)}

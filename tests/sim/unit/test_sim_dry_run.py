"""A dry run of a transfer policy: what would have been refused, why, when, and what would not."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrouter.core.errors import ConfigError, RoutingRefused
from kvrouter.core.requests import Leg
from kvrouter.core.workers import Role
from kvrouter.kernel.routing.route import route
from kvrouter.recording.schema import AttemptRecord, FleetChange, RequestRecord, Status, Worker
from kvrouter.sim.past.dry_run import DryRun, Lack, Verdict, dry_run
from kvrouter.sim.past.past_fleet import PastFleet
from kvrouter.sim.past.recorded_fleet import Policy
from tests.testing.recorded_traces import Change, attempt, constraints, leg, past, request, worker

Row = tuple[float, RequestRecord, Sequence[int]]

REQUIRED = Policy("zone", "required", None)
FALLBACK = Policy("zone", "fallback", None)

FLEET = (worker(1, "prefill", "a"), worker(2, "decode", "a"), worker(3, "decode", "b"))
"""Zone b decodes and does not prefill."""


def pair(prefill: str = "a", decode: str = "a") -> AttemptRecord:
    """A pair, by the zones that it was in."""
    there = {"a": "2/0", "b": "3/0", "": "4/0"}
    return attempt(
        leg("1/0", Leg.PREFILL, domains={"zone": prefill} if prefill else {}),
        leg(there[decode], Leg.DECODE, domains={"zone": decode} if decode else {}),
    )


def without_a(from_s: float, until_s: float) -> list[Change]:
    """Zone a has no decode worker meanwhile."""
    return [(from_s, FleetChange.LEFT, [FLEET[1]]), (until_s, FleetChange.JOINED, [FLEET[1]])]


def counts(of: DryRun) -> dict[Verdict, int]:
    return {verdict: of.count(verdict) for verdict in Verdict if of.count(verdict)}


def test_dry_run_counts_refusals_per_minute_while_a_zone_has_no_decode_worker() -> None:
    rows = [request(at * 20.0, [at], pair("a", "a" if at < 4 or at > 9 else "b")) for at in range(14)]
    done = dry_run(past(FLEET, rows, without_a(70.0, 190.0)), REQUIRED)
    assert counts(done) == {Verdict.UNCHANGED: 8, Verdict.REFUSED: 6}
    assert [each.number for each in done.refused] == [4, 5, 6, 7, 8, 9]
    assert (done.refused[0].at_s, done.refused[0].line, done.refused[0].prefill_domain) == (680.0, 104, "a")
    assert [(each.at_s, each.requests, each.refused) for each in done.minutes] == [
        (660.0, 3, 2), (720.0, 3, 3), (780.0, 3, 1),
    ]  # fmt: skip
    (group,) = done.groups
    assert (group.code, group.role, group.domain, group.requests) == (
        "no_eligible_worker", "decode", "zone", 6,
    )  # fmt: skip
    assert group.reasons == ("domain_mismatch",)
    assert done.lacks == (Lack("a", Role.DECODE, 6), Lack("b", Role.PREFILL, 6))
    assert done.by_prefill_domain == {"a": 6}
    assert counts(dry_run(past(FLEET, rows, without_a(70.0, 190.0)), FALLBACK)) == {
        Verdict.UNCHANGED: 8, Verdict.CROSSES: 6,
    }  # fmt: skip


def test_crossing_transfer_moves_where_a_pair_exists_and_whole_requests_stay() -> None:
    rows = [
        request(0.0, [1], pair("a", "b")),
        request(1.0, [2], pair("a", "")),
        request(2.0, [3], attempt(leg("3/0", domains={"zone": "b"}))),
    ]
    done = dry_run(past([*FLEET, worker(4, "decode")], rows), REQUIRED)
    assert done.verdicts == (Verdict.MOVED, Verdict.MOVED, Verdict.UNCHANGED)


def test_draining_silent_or_rezoned_workers_make_no_pair() -> None:
    gone: Sequence[Worker] = (
        worker(2, "decode", "a", draining=True),
        worker(2, "decode", "a", engine_silent=True),
        worker(2, "decode", "b"),
    )
    for changed in gone:
        rows = [request(0.0, [1], pair()), request(9.0, [2], pair("a", "b"))]
        done = dry_run(past(FLEET, rows, [(5.0, FleetChange.CHANGED, [changed])]), REQUIRED)
        assert done.verdicts == (Verdict.UNCHANGED, Verdict.REFUSED)
    silent = [(5.0, FleetChange.SILENT, [worker(2, "decode", "a", alive=False)])]
    answers = [*silent, (7.0, FleetChange.ANSWERS, [FLEET[1]])]
    assert dry_run(past(FLEET, rows, silent), REQUIRED).count(Verdict.REFUSED) == 1
    assert dry_run(past(FLEET, rows, answers), REQUIRED).count(Verdict.REFUSED) == 0


def test_dry_run_request_waits_for_its_domain_up_to_the_limit() -> None:
    rows = [request(0.0, [1], pair())]
    rows += [request(20.0 + 5.0 * at, [at], pair("a", "b")) for at in range(3)]
    recorded = past(FLEET, rows, without_a(10.0, 40.0))
    assert dry_run(recorded, REQUIRED, wait_s=9.0).count(Verdict.REFUSED) == 3
    done = dry_run(recorded, REQUIRED, wait_s=15.5)
    assert counts(done) == {Verdict.UNCHANGED: 1, Verdict.REFUSED: 1, Verdict.MOVED: 2}
    assert [each.number for each in done.refused] == [1]
    assert (done.waited, round(done.longest_wait_s)) == (2, 15)
    never = past(FLEET, rows, without_a(10.0, 40.0)[:1])
    assert dry_run(never, REQUIRED, wait_s=1e9).count(Verdict.REFUSED) == 3


def test_requests_refused_in_the_past_are_not_counted_as_refused() -> None:
    failed: dict[str, Any] = {"status": Status.FAILED, "code": "no_eligible_worker", "http_status": 503}
    nowhere = constraints(required_taints=("salted:0",))
    rows = [
        request(0.0, [1], pair()),
        request(1.0, [2], constraints=nowhere, **failed),
        request(2.0, [3], **failed),
    ]
    done = dry_run(past(FLEET, rows), REQUIRED)
    assert done.verdicts == (Verdict.UNCHANGED, Verdict.REFUSED_THEN, Verdict.NOT_PLACED_THEN)
    assert (done.refused, done.groups, done.minutes) == ((), (), ())


def test_dry_run_keeps_pins_adapters_and_lengths_of_requests() -> None:
    fleet = [*FLEET, worker(4, "prefill", "b"), worker(5, "decode", "a", context_length=100)]
    left: list[Change] = [(5.0, FleetChange.LEFT, [FLEET[1]])]
    rows = [
        request(0.0, [1], pair()),
        request(6.0, [2], pair("a", "b"), max_tokens=90),
        request(7.0, [3], pair("a", "b"), max_tokens=96),  # more than worker 5 has room for
        request(8.0, [3], pair("a", "b"), max_tokens=96, constraints=constraints(prefill_pin="1/0")),
        request(9.0, [4], pair("a", "b"), max_tokens=4091),  # an answer without a limit of its own
        request(10.0, [5], pair("a", "b"), adapter="x"),
    ]
    done = dry_run(past(fleet, rows, left), REQUIRED)
    assert done.verdicts == (
        Verdict.UNCHANGED, Verdict.MOVED, Verdict.MOVED, Verdict.REFUSED, Verdict.MOVED, Verdict.REFUSED,
    )  # fmt: skip
    ranged = [worker(1, "prefill", "a", prompt_tokens_max=10), *FLEET[1:]]
    rows = [request(0.0, [1], pair()), request(1.0, [1, 2, 3], pair())]
    assert dry_run(past(ranged, rows), REQUIRED).verdicts == (Verdict.UNCHANGED, Verdict.REFUSED)


def test_wrong_level_pin_role_or_worker_id_is_refused_by_name() -> None:
    rows = [request(0.0, [1], pair())]
    with pytest.raises(ConfigError, match=r"kv-transfer-domain: .*'rack'.*recorded: zone"):
        dry_run(past(FLEET, rows), Policy("rack", "required", None))
    pinned = [request(0.0, [1], pair(), constraints=constraints(pin="x"))]
    with pytest.raises(ConfigError, match=r"recording\.jsonl\.gz:100: constraints: a pin that is none"):
        dry_run(past(FLEET, pinned), REQUIRED)
    for wrong in (worker(1, "cook"), msgspec.structs.replace(FLEET[0], worker="one")):
        with pytest.raises(ConfigError, match=r"recording\.jsonl\.gz:1: worker"):
            dry_run(past([wrong, *FLEET[1:]], rows), REQUIRED)


@pytest.mark.parametrize("guessed", [{"media": True}, {"by_text": True}])
def test_media_and_prompts_routed_by_text_are_guesses_as_they_were(guessed: dict[str, bool]) -> None:
    recorded = past(FLEET, [request(0.0, [1]), request(1.0, [2], **guessed)])
    fleet = PastFleet(recorded.fleet, policy=REQUIRED)
    known, guess = recorded.requests
    assert not fleet.asks(known, aggregated=False).is_guess
    assert fleet.asks(guess, aggregated=False).is_guess


@st.composite
def fleets(draw: st.DrawFn) -> tuple[list[Worker], list[Row], list[Change]]:
    zones = st.sampled_from(("a", "b", ""))
    roles = st.sampled_from(("prefill", "decode", "both"))
    workers = [worker(name, draw(roles), draw(zones)) for name in range(1, draw(st.integers(2, 6)))]
    workers.append(worker(9, "prefill", "a"))
    changes: list[Change] = []
    for at in range(draw(st.integers(0, 8))):
        who = draw(st.sampled_from(workers))
        change = draw(st.sampled_from((FleetChange.LEFT, FleetChange.JOINED, FleetChange.SILENT)))
        if change is FleetChange.SILENT:
            who = worker(int(who.worker), who.role, who.domains.get("zone", ""), alive=False)
        changes.append((at * 3.0 + 0.5, change, [who]))
    asked = (None, constraints(pin="2"), constraints(required_taints=("dynamo.topology/zone=b",)))
    rows = [
        request(float(at), [at], pair("a", draw(zones)), constraints=draw(st.sampled_from(asked)))
        for at in range(draw(st.integers(1, 25)))
    ]
    return workers, rows, changes


@given(fleets())
@settings(max_examples=100, deadline=None)
def test_dry_run_refuses_exactly_where_the_routers_decision_refuses(
    made: tuple[list[Worker], list[Row], list[Change]],
) -> None:
    recorded = past(*made)
    done = dry_run(recorded, REQUIRED)
    for each in recorded.requests:  # asked on a fleet of its own, one by one
        fleet = PastFleet(recorded.fleet, policy=REQUIRED)
        while fleet.next_s is not None and fleet.next_s <= each.at_s + 0.0005:
            fleet.step()
        try:
            route(fleet.asks(each, aggregated=False), fleet.view)
        except RoutingRefused:
            assert done.verdicts[each.number] is Verdict.REFUSED
        else:
            assert done.verdicts[each.number] in (Verdict.UNCHANGED, Verdict.MOVED)

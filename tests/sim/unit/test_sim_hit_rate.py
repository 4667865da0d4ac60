"""The ladder of the hit rate: each loss that is injected is the one that it names, and its rungs descend."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrouter.core.errors import ConfigError
from kvrouter.recording.schema import AttemptRecord, FleetChange, RequestRecord
from kvrouter.sim.past.hit_ladder import CAUSES, RUNG_BEFORE, Cause, HitLadder, Rung
from kvrouter.sim.past.hit_rate import hit_ladder
from tests.testing.recorded_traces import BLOCK, Change, attempt, constraints, leg, past, request, worker

Row = tuple[float, RequestRecord, Sequence[int]]

ROOT = Path(__file__).parents[3]


def share(ladder: HitLadder, rung: Rung) -> float:
    return next(each.share for each in ladder.rungs if each.rung is rung)


def tokens(ladder: HitLadder, rung: Rung) -> int:
    return next(each.tokens for each in ladder.rungs if each.rung is rung)


def lost(ladder: HitLadder) -> dict[Cause, int]:
    return {loss.cause: loss.tokens for loss in ladder.losses}


def text(number: int, n_blocks: int = 10) -> list[int]:
    """The blocks of a text that no other number shares."""
    return [number * 1000 + at for at in range(n_blocks)]


def in_turn(n: int, texts: int, of: Iterable[AttemptRecord]) -> list[Row]:
    """Requests a second apart, for each of some texts in turn."""
    return [request(float(at), text(at % texts), each) for at, each in zip(range(n), of, strict=False)]


def test_ladder_without_losses_names_only_first_seen_and_partial_blocks() -> None:
    found = [attempt(leg("1/0", overlap=10 if at else 0, found=10 if at else 0)) for at in range(5)]
    ladder = hit_ladder(past([worker(1)], in_turn(5, 1, found)))
    assert tokens(ladder, Rung.PROMPTS) == 5 * 41
    assert [tokens(ladder, rung) for rung in list(Rung)[1:]] == [160] * 7
    assert lost(ladder) == {Cause.FIRST_SEEN: 40, Cause.NOT_A_BLOCK: 5}
    assert ladder.largest is None
    assert ladder.facts.requests == 5
    assert ladder.facts.warm_up_tokens > 0
    assert ladder.facts.fleet_blocks == 1000


def test_last_token_of_a_prompt_that_fills_its_blocks_is_never_cached() -> None:
    rows = [request(float(at), text(1, 3), attempt(leg("1/0", overlap=3, found=2)), tail=0) for at in (0, 1)]
    ladder = hit_ladder(past([worker(1)], rows))
    assert tokens(ladder, Rung.ENGINES) == tokens(ladder, Rung.EXPECTED) == 2 * 2 * BLOCK
    assert lost(ladder) == {Cause.NOT_A_BLOCK: 2 * BLOCK}
    assert ladder.facts.beyond_tokens == 2 * BLOCK  # the first one found what nobody recorded had asked for


def test_small_cache_is_named_as_the_largest_loss() -> None:
    nothing = [attempt(leg("1/0", found=0)) for _ in range(40)]
    ladder = hit_ladder(past([worker(1, kv_blocks=40)], in_turn(40, 8, nothing)))
    assert share(ladder, Rung.ENDLESS) > 0.7
    assert share(ladder, Rung.FLEET) < 0.1
    assert ladder.largest is Cause.CACHE_SIZE
    assert ladder.larger[1].share > 0.7  # eight texts and their answers fit into four times as much
    bigger = hit_ladder(past([worker(1, kv_blocks=40)], in_turn(40, 8, nothing)), lambda _: 1000)
    assert bigger.largest is Cause.EVICTED  # its card would be wrong
    assert lost(bigger).get(Cause.CACHE_SIZE, 0) == 0


def test_round_robin_routing_is_named_as_the_largest_loss() -> None:
    rows = []
    holds: set[tuple[int, int]] = set()
    for at in range(36):
        number, rank = at // 6, at % 6 + 1
        had = 10 if (number, rank) in holds else 0
        holds.add((number, rank))
        rows.append(
            request(float(at), text(number), attempt(leg(f"{rank}/0", found=had), mode="round-robin"))
        )
    ladder = hit_ladder(past([worker(name) for name in range(1, 7)], rows))
    assert share(ladder, Rung.PERFECT) == share(ladder, Rung.ENDLESS) > 0.8
    assert ladder.largest is Cause.ROUTER_MODE
    assert lost(ladder)[Cause.ROUTER_MODE] == tokens(ladder, Rung.PERFECT) == 6 * 5 * 40


def test_load_that_moves_requests_is_named_as_the_largest_loss() -> None:
    rows = [
        request(at / 10.0, text(1), attempt(leg(f"{at + 1}/0", found=0, last_s=100.0), placed_s=0.0))
        for at in range(4)
    ]
    rows += [request(200.0 + at, text(1), attempt(leg("1/0", overlap=10, found=10))) for at in range(3)]
    ladder = hit_ladder(past([worker(name) for name in range(1, 5)], rows))
    assert lost(ladder)[Cause.LOAD] == 3 * 40
    assert ladder.largest is Cause.LOAD
    idle = [request(10.0 * at, text(1), attempt(leg(f"{at + 1}/0", found=0))) for at in range(3)] + [
        request(50.0, text(1), attempt(leg("1/0", overlap=10, found=10)))
    ]
    ladder = hit_ladder(past([worker(name) for name in range(1, 4)], idle))
    assert ladder.largest is Cause.UNEXPLAINED  # the index knew, and nothing ran


def test_lost_kv_events_are_named_as_the_largest_loss() -> None:
    """The router expects nothing anywhere, and now and then engines find it."""
    rows, holds = [], set()
    for at in range(60):
        number, rank = at % 5, (at * 7) % 4 + 1
        had = 10 if (number, rank) in holds else 0
        holds.add((number, rank))
        rows.append(request(float(at), text(number), attempt(leg(f"{rank}/0", found=had))))
    ladder = hit_ladder(past([worker(name) for name in range(1, 5)], rows))
    found = lost(ladder)
    assert share(ladder, Rung.EXPECTED) == 0.0
    assert share(ladder, Rung.ENGINES) > 0.6
    assert ladder.facts.found_unexpected_tokens == tokens(ladder, Rung.ENGINES) == found[Cause.UNSEEN]
    assert found[Cause.INDEX] > 0
    assert {Cause.LOAD, Cause.UNEXPLAINED}.isdisjoint(found)
    assert ladder.largest is Cause.UNSEEN
    assert CAUSES[Cause.UNSEEN].remedy == CAUSES[Cause.INDEX].remedy


def test_stale_index_early_eviction_and_missing_reports_are_named() -> None:
    stale = [attempt(leg("1/0", overlap=10 if at else 0, found=0)) for at in range(5)]
    ladder = hit_ladder(past([worker(1)], in_turn(5, 1, stale)))
    assert ladder.largest is Cause.STALE
    assert lost(ladder)[Cause.STALE] == 160
    off = [attempt(leg("1/0", found=0)) for _ in range(5)]
    assert hit_ladder(past([worker(1)], in_turn(5, 1, off))).largest is Cause.EVICTED
    silent = [attempt(leg("1/0")) for _ in range(5)]
    ladder = hit_ladder(past([worker(1)], in_turn(5, 1, silent)))
    assert ladder.largest is Cause.NOT_REPORTED
    assert (ladder.facts.unreported, ladder.facts.unreported_tokens) == (5, 5 * 41)


def test_reason_that_kept_a_request_from_its_best_cache_is_named() -> None:
    first = request(0.0, text(1), attempt(leg("1/0", found=0)))

    def second(*changes: Change, **asked: Any) -> HitLadder:
        there = attempt(leg("2/0", found=0, candidates=1), placed_s=0.0)
        workers = [worker(1), worker(2, taints=("gpu/b",))]
        rows = [first, request(9.0, text(1), there, **asked)]
        return hit_ladder(past(workers, rows, changes))

    taint = constraints(required_taints=("gpu/b",))
    assert lost(second(constraints=taint)).get(Cause.CONSTRAINTS) == 40
    assert lost(second(constraints=constraints(pin="2"))).get(Cause.CONSTRAINTS) == 40
    assert lost(second((5.0, FleetChange.SILENT, [worker(1, alive=False)])))[Cause.AWAY] == 40
    assert lost(second((5.0, FleetChange.CHANGED, [worker(1, draining=True)])))[Cause.AWAY] == 40
    assert lost(second())[Cause.PASSED_OVER] == 40  # one candidate, where two took requests
    gone = second((5.0, FleetChange.LEFT, [worker(1)]))
    assert lost(gone)[Cause.COPIES if Cause.COPIES in lost(gone) else Cause.APART] == 40
    assert (gone.facts.workers_left, gone.facts.blocks_left) == (1, 11)


def test_transfer_policy_that_keeps_prefill_from_a_zone_is_named() -> None:
    policy = {"transfer_domain": "zone", "enforcement": "required"}
    workers = [
        worker(1, "prefill", "a", **policy), worker(2, "prefill", "b", **policy),
        worker(3, "decode", "a", **policy), worker(4, "decode", "b", **policy),
    ]  # fmt: skip

    def pair(prefill: str, decode: str) -> AttemptRecord:
        return attempt(leg(prefill, "prefill", found=0), leg(decode, "decode"))

    rows = [request(0.0, text(1), pair("1/0", "3/0")), request(9.0, text(1), pair("2/0", "4/0"))]
    left: list[Change] = [(5.0, FleetChange.LEFT, [workers[2]])]
    ladder = hit_ladder(past(workers, rows, left))
    assert ladder.largest is Cause.TRANSFER_POLICY
    assert lost(ladder)[Cause.TRANSFER_POLICY] == 40
    assert ladder.facts.fleet_blocks == 2000  # of those that prefill
    bare = [worker(int(each.worker), each.role, each.domains["zone"]) for each in workers]
    by_router = [request(0.0, text(1), pair("1/0", "3/0"))]
    again = attempt(*pair("2/0", "4/0").legs, constraint="required zone=b")
    by_router.append(request(9.0, text(1), again))
    ladder = hit_ladder(past(bare, by_router, [(5.0, FleetChange.LEFT, [bare[2]])]))
    assert lost(ladder)[Cause.TRANSFER_POLICY] == 40  # the router's own


def test_answers_count_as_cached_beginning_of_the_next_turn_without_loss() -> None:
    rows = [
        request(0.0, text(1, 10), attempt(leg("1/0", found=0)), output_tokens=8),
        request(9.0, text(1, 14), attempt(leg("1/0", overlap=12, found=12))),
    ]
    ladder = hit_ladder(past([worker(1)], rows))
    assert ladder.facts.beyond_tokens == 8
    assert [tokens(ladder, rung) for rung in list(Rung)[1:]] == [48] * 7
    assert {each.simulated_tokens for each in ladder.rungs} == {None}  # no model lacks the answer


def test_requests_without_a_worker_are_left_out_and_the_last_attempt_counts() -> None:
    lost_first = attempt(leg("1/0", found=None, last_s=1.0), lost="aggregated")
    second = attempt(leg("2/0", overlap=0, found=10), placed_s=1.0)
    never = attempt(leg("1/0", sent_s=None))
    rows = [
        request(0.0, text(1), attempt(leg("2/0", found=0))),
        request(5.0, text(1), lost_first, second, ended_s=2.0),
        request(6.0, text(1), never),
        request(7.0, text(1)),
    ]
    ladder = hit_ladder(past([worker(1), worker(2)], rows))
    assert (ladder.facts.requests, ladder.facts.left_out) == (2, 2)
    assert tokens(ladder, Rung.ENGINES) == 40
    with pytest.raises(ConfigError, match="reached a worker"):
        hit_ladder(past([worker(1)], rows[2:]))


def test_workers_without_a_cache_size_count_as_unlimited_and_are_counted() -> None:
    nothing = [attempt(leg("1/0", found=0)) for _ in range(20)]
    ladder = hit_ladder(past([worker(1, kv_blocks=None)], in_turn(20, 8, nothing)))
    assert (ladder.facts.fleet_blocks, ladder.facts.workers_without_size) == (None, 1)
    assert share(ladder, Rung.FLEET) == share(ladder, Rung.ENDLESS)


def test_each_cause_has_a_text_whose_flags_and_metrics_exist() -> None:
    settings_page = (ROOT / "docs/settings.md").read_text()
    metrics = (ROOT / "docs/metrics.md").read_text()
    elsewhere = {"--compare", "--request-id", "--enable-prompt-tokens-details", "--prompt-tokens-min",
                 "--kv-transfer-enforcement"}  # fmt: skip
    assert CAUSES.keys() == RUNG_BEFORE.keys() == set(Cause)
    for said in CAUSES.values():
        for flag in re.findall(r"--[a-z][a-z-]+", said.why + said.remedy):
            assert flag in elsewhere or f"`{flag}`" in settings_page, flag
        for metric in re.findall(r"kvrouter_[a-z_]+", said.remedy):
            assert f"`{metric}`" in metrics, metric


# Laws


@st.composite
def rows_of(draw: st.DrawFn) -> tuple[int, int, list[Row], list[Change]]:
    """A few workers, small caches, requests that share beginnings, counts that may say anything."""
    n_workers = draw(st.integers(1, 4))
    kv_blocks = draw(st.integers(1, 60))
    rows = []
    for at in range(draw(st.integers(1, 25))):
        names = text(draw(st.integers(0, 3)), draw(st.integers(0, 6)))
        names += text(100 + draw(st.integers(0, 5)), draw(st.integers(0, 4)))
        chained = [hash(tuple(names[: end + 1])) & (2**64 - 1) for end in range(len(names))]
        found = draw(st.none() | st.integers(0, len(chained)))
        here = leg(
            f"{draw(st.integers(1, n_workers))}/0", overlap=draw(st.integers(0, len(chained))), found=found,
            last_s=draw(st.sampled_from((0.01, 0.5, 20.0))), candidates=draw(st.integers(0, 4)),
        )  # fmt: skip
        mode = draw(st.sampled_from(("kv", "random")))
        rows.append(request(float(at), chained, attempt(here, mode=mode), tail=draw(st.integers(1, 3))))
    changes: list[Change] = []
    for _ in range(draw(st.integers(0, 3))):
        who = worker(draw(st.integers(1, n_workers)), kv_blocks=kv_blocks)
        at_s = draw(st.integers(0, 25)) + 0.25
        change = draw(st.sampled_from((FleetChange.LEFT, FleetChange.JOINED, FleetChange.CHANGED)))
        changes.append((at_s, change, [who]))
    return n_workers, kv_blocks, rows, sorted(changes, key=lambda each: each[0])


@given(rows_of())
@settings(max_examples=100, deadline=None)
def test_rungs_descend_and_losses_add_up_between_them(
    made: tuple[int, int, list[Row], list[Change]],
) -> None:
    n_workers, kv_blocks, rows, changes = made
    workers = [worker(name, kv_blocks=kv_blocks) for name in range(1, n_workers + 1)]
    ladder = hit_ladder(past(workers, rows, changes))
    found = [figure.tokens for figure in ladder.rungs]
    descending = found[: list(Rung).index(Rung.EXPECTED) + 1]
    assert descending == sorted(descending, reverse=True)
    assert all(loss.tokens > 0 for loss in ladder.losses)
    for rung, after, before in zip(list(Rung), found[1:], found, strict=False):
        between = sum(loss.tokens for loss in ladder.losses if loss.after is rung)
        gained = ladder.facts.found_unexpected_tokens if rung is Rung.EXPECTED else 0
        assert before - between + gained == after, rung
    engine = sum(
        record.attempts[0].legs[0].overlap_blocks * BLOCK if counted is None else counted
        for _, record, names in rows
        for counted in (record.attempts[0].legs[0].cached_tokens,)
    )
    assert tokens(ladder, Rung.ENGINES) == engine
    assert [each.tokens for each in ladder.larger] == sorted(each.tokens for each in ladder.larger)


@given(rows_of())
@settings(max_examples=60, deadline=None)
def test_ladder_is_the_same_with_an_index_over_the_caches(
    made: tuple[int, int, list[Row], list[Change]],
) -> None:
    n_workers, kv_blocks, rows, changes = made
    workers = [worker(name, kv_blocks=kv_blocks) for name in range(1, n_workers + 1)]
    asked = hit_ladder(past(workers, rows, changes))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvrouter.sim.past.hit_rate.RANKS_ASKED", 0)
        assert hit_ladder(past(workers, rows, changes)) == asked


@given(rows_of())
@settings(max_examples=60, deadline=None)
def test_single_unlimited_worker_has_equal_endless_fleet_and_chosen_rungs(
    made: tuple[int, int, list[Row], list[Change]],
) -> None:
    _, _, rows, _ = made
    alone = [(at_s, record_on_first(record), names) for at_s, record, names in rows]
    ladder = hit_ladder(past([worker(1, kv_blocks=None)], alone))
    endless = tokens(ladder, Rung.ENDLESS)
    assert (
        tokens(ladder, Rung.FLEET) == tokens(ladder, Rung.PERFECT) == tokens(ladder, Rung.CHOSEN) == endless
    )


def record_on_first(record: RequestRecord) -> RequestRecord:
    (only,) = record.attempts
    (here,) = only.legs
    moved = msgspec.structs.replace(here, worker="1/0")
    return msgspec.structs.replace(record, attempts=(msgspec.structs.replace(only, legs=(moved,)),))

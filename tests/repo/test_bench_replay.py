"""The comparison of policies by replays: traces, tuning and judging, what is kept, what the page says."""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from benchmarks.choice.__main__ import main as choice_main
from benchmarks.http_replay.machine import Commit
from benchmarks.replay import contest as contest_module
from benchmarks.replay.__main__ import FORMS, MEMORIES, jobs, main
from benchmarks.replay.cases import AZURE, CASES, LATE_S, WINDOWS, Case, Rows, passages
from benchmarks.replay.contest import (
    BOUND,
    FINALISTS,
    FREE,
    NEAR,
    POINTS_MAX,
    TUNED,
    Cell,
    Contest,
    Entrant,
    Job,
    Merit,
    Replays,
    Tuned,
    contest,
    our_points,
    rule_points,
    sustained,
    tune,
)
from benchmarks.replay.fleets import MEMORY_TOKENS, SAME_LINKS, TIERS, Workers, zoned
from benchmarks.replay.kept import Done, Head, KeptRun
from benchmarks.replay.page import PolicyStudy
from benchmarks.replay.replays import OBJECTIVE, Figures, simulation_of, whole
from benchmarks.replay.table import bars, line_of, tables
from benchmarks.replay.zones import ONE, SPLIT, ZoneJob, zone_cell, zone_jobs
from kvrouter.fleetfile.fleet_checks import load_fleet
from kvrouter.sim.replay.variant import OURS
from kvrouter.sim.rules.registry import RULES
from kvrouter.sim.traces.read import open_trace
from kvrouter.sim.traces.trace_request import TraceRequest

AGENTS, CODE, CHAT = (
    next(number for number, case in enumerate(CASES) if case.name == name)
    for name in ("coding agents", "code service", "short chat")
)
HEAD = Head("short", 900, 5, Commit("0123456789ab", changed=False))
JOB = Job(0, TIERS, 8, MEMORY_TOKENS, 0.8, 900, 2)


def figures(
    policy: str, ttft: float, p99: float = 9.0, itl: float = 8.0, failed: int = 0, later: float = 0.0
) -> Figures:
    return Figures(
        policy=policy,
        ttft_ms=(ttft, ttft + later),
        ttft_p99_ms=(p99, p99),
        itl_ms=(itl, itl),
        good=(1.0, 1.0),
        good_per_s=(3.0, 3.0),
        cached=(0.5, 0.5),
        failed=(failed, failed),
    )


def cell(*of: Figures, window: int = 1) -> Cell:
    return Cell(JOB, window, 2.0, of)


# Traces


def test_every_form_has_each_contest_once_over_two_sizes_of_fleets() -> None:
    todo = jobs(FORMS["short"])
    keys = [job.key for job in todo] + [job.key for job in zone_jobs(900, 5)]
    assert len(set(keys)) == len(keys)
    sizes = Counter((CASES[job.case].name, job.size) for job in todo)
    assert len(sizes) == 2 * len(CASES)
    agents = [job for job in todo if job.case == AGENTS]
    assert {job.memory_tokens for job in agents} == set(MEMORIES)
    assert FORMS["short"].seeds >= 5


@pytest.mark.parametrize("case", [CASES[AGENTS], CASES[CODE]], ids=lambda case: case.name)
def test_windows_of_a_trace_share_no_request(case: Case) -> None:
    windows = [Rows(case, 1.0, 10_000, window) for window in range(WINDOWS)]
    whole_trace = list(case.read())
    assert sum(len(rows.rows) for rows in windows) == pytest.approx(len(whole_trace), abs=WINDOWS)
    lines = [{row.line for row in rows.rows} for rows in windows]
    assert not lines[0] & lines[1]
    assert not lines[1] & lines[2]
    for rows in windows:
        assert [row.number for row in rows.rows] == list(range(len(rows.rows)))
        assert rows.rows[0].at_s == 0.0
        assert all(wait.number < row.number for row in rows.rows for wait in row.waits)


def test_a_closed_case_is_sped_up_in_all_but_its_answers() -> None:
    case = CASES[AGENTS]
    once, thrice = Rows(case, 1.0, 40), Rows(case, 3.0, 40)
    assert once.is_closed
    assert any(wait.think_s for row in once.rows for wait in row.waits)
    for slow, fast in zip(once.rows, thrice.rows, strict=True):
        assert fast.at_s == pytest.approx(slow.at_s / 3)
        assert fast.pieces == slow.pieces
        assert [wait.number for wait in fast.waits] == [wait.number for wait in slow.waits]
        for fast_one, slow_one in zip(fast.waits, slow.waits, strict=True):
            assert fast_one.think_s == pytest.approx(slow_one.think_s / 3)
    file = load_fleet(zoned("ab", 1.0)).fleet
    result = whole(simulation_of(file, thrice.rows, thrice, 0))
    arrived = {outcome.number: outcome.arrived_s for outcome in result.outcomes}
    ended = {outcome.number: outcome.arrived_s + (outcome.e2e_s or 0.0) for outcome in result.outcomes}
    followers = [row for row in thrice.rows if row.waits]
    assert followers
    for row in followers:
        (wait,) = row.waits
        assert arrived[row.number] == pytest.approx(ended[wait.number] + wait.think_s)


def test_copies_of_closed_sessions_share_no_contents() -> None:
    once, twice = (Rows(CASES[AGENTS], 1.0, 10_000, 1, copies) for copies in (1, 2))
    assert len(twice.rows) == 2 * len(once.rows)
    of_copy: dict[bool, set[int]] = {False: set(), True: set()}
    for row in twice.rows:
        of_copy[row.session.endswith(", copy 1")].update(row.pieces)
        for wait in row.waits:
            assert twice.rows[wait.number].session.endswith(", copy 1") is row.session.endswith(", copy 1")
    assert len(of_copy[True]) == len(of_copy[False])
    assert not of_copy[True] & of_copy[False]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_a_seed_determines_the_delay_of_each_request(case: int) -> None:
    rows = Rows(CASES[case], 1.0, 40)
    late = [row for seed in (0, 1) for row in rows.delayed(seed)]
    assert rows.delayed(1) == late[40:]
    assert late[:40] != late[40:]
    for row in late:
        before = rows.rows[row.number]
        assert 0.0 <= row.at_s - before.at_s <= LATE_S
        assert 0.0 <= row.not_before_s - before.not_before_s <= LATE_S
        assert [wait.number for wait in row.waits] == [wait.number for wait in before.waits]
        for wait, of in zip(row.waits, before.waits, strict=True):
            assert 0.0 <= wait.think_s - of.think_s <= LATE_S
    if not rows.is_closed:
        assert [row.at_s for row in late[:40]] == sorted(row.at_s for row in late[:40])


def test_the_code_service_has_azures_arrivals_and_answers_of_28_tokens() -> None:
    rows, published = list(CASES[CODE].read()), list(open_trace(AZURE))
    assert [(row.at_s, row.input_tokens) for row in rows] == [
        (row.at_s, row.input_tokens) for row in published
    ]
    assert sum(row.output_tokens for row in rows) / len(rows) == pytest.approx(28, abs=0.5)


def test_short_chat_has_prompts_of_300_tokens() -> None:
    rows = list(CASES[CHAT].read())
    assert sum(row.input_tokens for row in rows) / len(rows) == pytest.approx(300, abs=3)


def test_shared_passages_recur_and_hardly_ever_as_a_prefix() -> None:
    rows = list(passages(2_000))
    assert rows == list(passages(2_000))
    known: set[int] = set()
    heads: set[int] = set()
    n_pieces = n_known = n_prefixes = 0
    for row in rows:
        n_pieces += len(row.pieces)
        n_known += sum(piece in known for piece in row.pieces)
        n_prefixes += row.pieces[0] in heads
        known.update(row.pieces)
        heads.add(row.pieces[0])
    assert n_known / n_pieces > 0.5
    assert n_prefixes / len(rows) == pytest.approx(0.05, abs=0.015)


# Tuning and judging


def test_rules_and_ours_are_tuned_over_enforcement_and_level() -> None:
    for rule in RULES:
        asked: list[Entrant] = []

        def merit_of(entrant: Entrant, *, is_half: bool, asked: list[Entrant] = asked) -> Merit:
            if is_half:
                asked.append(entrant)
            return 0, float(entrant.level != "rack") + (entrant.policy != rule_points(rule)[-1])  # noqa: B023

        best, _, n_points = tune(rule_points(rule), BOUND, merit_of)
        assert n_points == len(asked) == len(set(asked)) <= POINTS_MAX
        assert {(each.enforcement, each.level) for each in asked} == {FREE, *BOUND}
        assert {each.policy for each in asked} == set(rule_points(rule))
        assert best == Entrant(rule_points(rule)[-1], "required", "rack")
    *_, n_ours = tune(our_points(), [*BOUND, *NEAR], lambda _entrant, *, is_half: (0, float(is_half)))
    assert n_ours <= POINTS_MAX


def test_the_published_values_of_a_rule_are_tried_first() -> None:
    assert rule_points("sglang")[0] == "sglang:cache=0.3,balance_abs=64,balance_rel=1.5"
    assert rule_points("lmetric") == ["lmetric"]
    assert our_points()[0] == f"{OURS}:router_cost=time"


def test_a_point_that_is_best_over_the_whole_window_wins() -> None:
    def merit_of(entrant: Entrant, *, is_half: bool) -> Merit:
        of = {"a": 1.0, "b": 2.0, "c": 3.0} if is_half else {"a": 3.0, "b": 1.0, "c": 0.0}
        return 0, of[entrant.policy[0]]

    policies = ["c", "b", "a", *(f"c{number}" for number in range(5))]
    best, merit, n_points = tune(policies, (), merit_of)
    assert (best.policy, merit, n_points) == ("b", (0, 1.0), 8), "c was not among the best quarter"


def test_a_bound_policy_keeps_kv_in_its_level() -> None:
    replays = Replays(msgspec.structs.replace(JOB, rows=24))
    for entrant in (Entrant("round-robin"), Entrant("random", "required", "rack")):
        simulation, variant = replays.simulation(entrant, 1, 0)
        racks = {
            (move.src["rack"], move.dst["rack"])
            for outcome in whole(simulation).outcomes
            for move in outcome.moves
        }
        assert racks
        policy = variant.fleet.kv_transfer
        assert (policy is None) is (entrant.enforcement is None)
        assert policy is None or all(src == dst for src, dst in racks)


def test_a_contest_judges_ours_and_the_best_rules_in_the_other_windows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rules = {rule: RULES[rule] for rule in ("random", "least-loaded", "lmetric", "sticky", "predicted-ttft")}
    monkeypatch.setattr(contest_module, "RULES", rules)
    job = msgspec.structs.replace(JOB, rows=24)
    found = contest(Replays(job), [OURS], our_points()[:2])
    assert [each.window for each in found.cells] == list(range(1, WINDOWS))
    assert {each.rule for each in found.tuned} == {OURS, *rules}
    finalists = [each.policy for each in found.tuned if each.rule != OURS][:FINALISTS]
    assert [(each.failed, each.ttft_ms) for each in found.tuned[1:]] == sorted(
        (each.failed, each.ttft_ms) for each in found.tuned[1:]
    )
    for each in found.cells:
        assert [of.policy for of in each.figures] == [OURS, TUNED, *finalists]
        assert all(len(set(of.ttft_ms)) == job.seeds for of in each.figures)
        assert line_of(each).best.policy in finalists


def test_figures_cover_only_the_second_half_of_a_window() -> None:
    replays = Replays(msgspec.structs.replace(JOB, rows=80, seeds=1))
    found = replays.figures("x", Entrant("round-robin"), 1)
    simulation, _ = replays.simulation(Entrant("round-robin"), 1, 0)
    outcomes = whole(simulation).outcomes
    counted = [each for each in outcomes if each.number >= 40]
    times = [each.ttft_s for each in counted if each.ttft_s is not None]
    assert len(times) == 40
    assert found.ttft_ms[0] == pytest.approx(sum(times) / 40 * 1e3)
    arrived = [each.arrived_s for each in counted]
    good = OBJECTIVE.are_met(outcomes.table()).tolist()[40:].count(True)
    assert found.good_per_s[0] == pytest.approx(good / (max(arrived) - min(arrived)))


@pytest.mark.parametrize(
    ("limit", "span_s", "most"), [(11.7, 1_000.0, 11.7), (0.2, 1_000.0, 0.2), (11.7, 50.0, 5.0)]
)
def test_a_load_is_what_round_robin_sustains_to_a_tenth(
    monkeypatch: pytest.MonkeyPatch, limit: float, span_s: float, most: float
) -> None:
    seen = msgspec.defstruct("Seen", [("good_share", float), ("errors", dict)])

    def sustains(_document: object, rows: Rows) -> object:
        return seen(1.0 if span_s / rows.rows[1].at_s <= limit else 0.0, {})

    def rows_of(_case: Case, load: float, _rows_max: int) -> Rows:
        rows = Rows(CASES[CHAT], 1.0, 2)
        rows.rows[1] = msgspec.structs.replace(rows.rows[1], at_s=span_s / load)
        return rows

    monkeypatch.setattr(contest_module, "_round_robin", sustains)
    monkeypatch.setattr(contest_module, "rows_of", rows_of)
    sustained.cache_clear()
    assert most / 1.1 <= sustained(Workers(SAME_LINKS, 8), 0, 2) <= most
    sustained.cache_clear()


def test_a_stopped_replay_is_not_taken_as_complete() -> None:
    rows = Rows(CASES[0], 3.0, 4)

    def stopped() -> Iterator[TraceRequest]:
        yield rows.rows[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        whole(simulation_of(load_fleet(zoned("ab", 1.0)).fleet, stopped(), rows, 0))


def test_only_a_static_split_fails_requests_without_its_zones_decoders() -> None:
    whole_split, together, apart = (
        zone_cell(ZoneJob(2, setup, loses, 60, 1)).figures
        for setup, loses in ((SPLIT, False), (ONE, True), (SPLIT, True))
    )
    assert whole_split.failed == together.failed == (0,)
    assert apart.failed[0] > 10
    assert apart.good_per_s[0] < together.good_per_s[0]


# What is kept


def done(key: str, of: object) -> Done:
    return Done(key, 1.5, msgspec.Raw(msgspec.json.encode(of)))


def test_a_stopped_run_resumes_from_its_kept_results(tmp_path: Path) -> None:
    path = tmp_path / "short.kept"
    found = Contest((), (cell(figures("lmetric", 2.0)),))
    KeptRun(path, HEAD).add(done(JOB.key, found))
    again = KeptRun(path, HEAD)
    assert again.found([JOB], Contest) == (found,)
    with path.open("ab") as file:
        file.write(b'{"key": "cut o')
    onward = KeptRun(path, HEAD)
    onward.add(done("two", 2))
    asked: list[str] = []
    last = KeptRun(path, HEAD)
    assert set(last.done) == {JOB.key, "two"}
    last.run([JOB], lambda job: asked.append(job.key), 1)
    assert asked == []
    onward.remove()
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    "other",
    [
        Head("short", 900, 4, HEAD.commit),
        Head("short", 800, 5, HEAD.commit),
        Head("short", 900, 5, Commit("ba9876543210", changed=False)),
    ],
)
def test_results_kept_by_another_run_are_ignored(tmp_path: Path, other: Head) -> None:
    path = tmp_path / "short.kept"
    KeptRun(path, other).add(done("one", 1))
    assert KeptRun(path, HEAD).done == {}
    path.write_text("no JSON\n")
    assert KeptRun(path, HEAD).done == {}


# The page


def test_the_table_says_first_where_ours_loses_with_ratio_and_interval() -> None:
    peer = figures("lmetric, required host", 100.0)
    slower = [figures(OURS, 104.0, later=4.0), figures(TUNED, 99.0), figures("dynamo", 120.0), peer]
    faster = [figures(OURS, 90.0), figures(TUNED, 80.0), peer]
    tuned = (Tuned(f"{OURS}, required rack", 0, 90.0, 20), Tuned("lmetric, required host", 0, 100.0, 4))
    page = "\n".join(tables([Contest(tuned, (cell(*faster), cell(*slower, window=2)))]))
    lost, rest = page.split("## Bars over the whole table")
    assert "1 of 2 cells" in lost
    assert "| conversation | 3 | 8 links in tiers | 2048k tokens | 0.8 (2.0 ×) | 106 (104 to 108) |" in lost
    assert "| lmetric, required host | 100 (100 to 100) | 8.0 | 1.060 (1.040 to 1.080) |" in lost
    assert "| 0.900 (0.900 to 0.900) | 1.000 | 1.000 | 0.800 |" in rest
    assert "1 of 2: 50.0% | **no** |" in rest
    assert "+6.0%: conversation, 8 links in tiers, 2048k tokens, load 0.8, window 3 | **no** |" in rest
    assert "| kvrouter, tuned | 1 | 0.90 | 0.90 | 0 | 1 | 0 |" in rest
    assert "Nowhere." in "\n".join(tables([Contest(tuned, (cell(*faster),))]))


@pytest.mark.parametrize(
    ("ours", "missed"),
    [
        (figures(OURS, 101.0, p99=9.1, itl=8.1), 0),
        (figures(OURS, 100.0, p99=9.3), 1),
        (figures(OURS, 95.0, p99=9.3), 0),
        (figures(OURS, 100.0, itl=8.3), 1),
        (figures(OURS, 96.0, itl=8.3), 0),
        (figures(OURS, 90.0, failed=1), 2),
        (figures(OURS, 102.0), 1),
        (figures(OURS, 106.0), 2),
    ],
)
def test_each_bar_fails_by_its_own_figures(ours: Figures, missed: int) -> None:
    line = line_of(cell(ours, figures("lmetric", 100.0), figures("dynamo", 50.0, failed=2)))
    assert line.best.policy == "lmetric"
    assert sum("**no**" in row for row in bars([line])) == missed


@pytest.mark.parametrize("entry", [main, choice_main], ids=["policies", "costs"])
def test_the_check_form_writes_pages_that_link_their_data(tmp_path: Path, entry: object) -> None:
    arguments = ["--form", "check", "--processes", "2", "--output", str(tmp_path)]
    ran = CliRunner().invoke(entry, arguments, catch_exceptions=False)  # type: ignore[arg-type]
    assert ran.exit_code == 0
    for page in tmp_path.glob("*.md"):
        text = page.read_text()
        links = re.findall(r"\]\((results/[^)]+)\)", text)
        assert len(links) == 1
        assert (tmp_path / links[0]).is_file()
        assert "--form check" in text
    assert not list((tmp_path / "results").glob("*.kept"))
    if entry is main:
        study = msgspec.json.decode((tmp_path / "results" / "check.json").read_bytes(), type=PolicyStudy)
        assert len(study.zones) == 8
        assert {each.job.case for found in study.contests for each in found.cells} == {CODE}

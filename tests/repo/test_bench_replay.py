"""The comparison of policies by replays: what is tried and replayed, what is kept, what the page says."""

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from benchmarks.http_replay.machine import Commit, Machine
from benchmarks.replay.__main__ import FORMS, studied, work, write
from benchmarks.replay.cases import CASES, LATE_S, RATIOS, Case, Cell, Rows, Tried, ZoneCell, fleet
from benchmarks.replay.kept import Done, Head, KeptRun
from benchmarks.replay.page import Study, markdown, rule, tables
from benchmarks.replay.plots import Bar, Group, plot
from benchmarks.replay.policies import OURS_GRID, Contest, Job, jobs, published
from benchmarks.replay.replays import over_seeds, replayed
from benchmarks.replay.zones import ONE, SPLIT, ZoneJob, zone_cell, zone_jobs
from kvrouter.fleetfile.fleet_checks import load_fleet
from kvrouter.sim.replay.summary import Objective, Summary, summarize
from kvrouter.sim.rules.registry import GRID_MAX, RULES, parse_rule
from kvrouter.sim.traces.trace_request import TraceRequest

AGENTS = next(number for number, case in enumerate(CASES) if case.is_closed)
COMMIT = Commit("0123456789ab", changed=False)
HEAD = Head("short", 3_000, 5, COMMIT)


def cell(policy: str, ttft_ms: float, *, failed: int = 0, ratio: float = 1.0) -> Cell:
    return Cell(
        policy=policy,
        case="t",
        load=2.0,
        ratio=ratio,
        ttft_ms=(ttft_ms, ttft_ms),
        ttft_p99_ms=(1.0, 1.0),
        good=(1.0, 1.0),
        good_per_s=(3.0, 3.0),
        cached=(0.5, 0.5),
        failed=(failed, failed),
        crossing_gb=(0.0, 0.0),
        tried=(Tried(policy, 0, ttft_ms),),
    )


def study(*cells: Cell) -> Study:
    machine = Machine(cpu="a CPU", cores=2, system="Linux", python="3")
    zones = [
        ZoneCell(
            zones=2,
            setup=setup,
            loses_decoders=loses,
            ratio=20.0,
            ttft_ms=(ttft_ms,),
            ttft_p99_ms=(9.0,),
            good=(0.5,),
            good_per_s=(1.25,),
            cached=(0.25,),
            failed=(0,),
        )
        for loses in (True, False)
        for setup, ttft_ms in ((ONE, 11.0), (SPLIT, 22.0))
    ]
    return Study("short", "now", COMMIT, machine, 3_000, 5, tuple(zones), cells)


def test_the_short_form_has_every_policy_case_load_and_ratio() -> None:
    form = FORMS["short"]
    assert (form.rows, form.seeds, tuple(form.ratios)) == (3_000, 5, (1.0, 4.0, 20.0))
    todo = jobs(form.rows, form.seeds, form.ratios, form.cases, form.n_loads)
    assert len(todo) == 4 * 3 * (1 + len(RULES))
    keys = [job.key for job in todo] + [job.key for job in zone_jobs(form.rows, form.seeds)]
    assert len(set(keys)) == len(keys)
    assert {(CASES[job.case].name, job.load) for job in todo} == {
        (case.name, load) for case in CASES for load in case.loads
    }


def test_our_policy_and_peer_rules_have_the_same_tuning_budget() -> None:
    assert len(set(OURS_GRID)) == len(OURS_GRID) <= GRID_MAX
    assert {entrant.enforcement for entrant in OURS_GRID} == {None, "preferred", "required"}
    for job in jobs(24, 2, (1.0, 20.0), [0], 1):
        if job.policy in ("sglang", "lmetric"):
            for found in Contest(job).cells():
                names = [tried.policy for tried in found.tried]
                assert len(names) == len(set(names)) <= GRID_MAX
                assert names[:2] == [published(job.policy), f"{published(job.policy)}, required"]
                best = min(found.tried, key=lambda tried: (tried.failed, tried.ttft_ms))
                assert found.policy == best.policy


def test_only_zone_bound_figures_are_equal_at_every_ratio() -> None:
    job = Job(AGENTS, 10.0, "kvrouter", (1.0, 20.0), 40, 2)
    found = Contest(job).cells()
    assert [(each.ratio, rule(each.policy)) for each in found] == [
        (ratio, name)
        for ratio in (1.0, 20.0)
        for name in ("kvrouter", "kvrouter, preferred", "kvrouter, required", "kvrouter, tuned")
    ]
    (blind, preferred, required, _), (far_blind, far_preferred, far_required, _) = found[:4], found[4:]
    assert far_blind.ttft_ms > blind.ttft_ms
    nothing_crosses = preferred.crossing_gb == far_preferred.crossing_gb == (0.0, 0.0)
    assert (far_preferred.ttft_ms == preferred.ttft_ms) is nothing_crosses
    assert far_required.ttft_ms == required.ttft_ms
    assert required.crossing_gb == (0.0, 0.0)
    # and all of them are what a run at that ratio alone gives
    assert Contest(msgspec.structs.replace(job, ratios=(20.0,))).cells() == found[4:]


def test_figures_cover_only_the_second_half_of_the_rows() -> None:
    job = Job(0, 3.0, "round-robin", (1.0,), 80, 1)
    (found,) = Contest(job).cells()
    rows = Rows(CASES[0], 3.0, 80)
    file = load_fleet(fleet("ab", 1.0, policy=None)).fleet
    result = replayed(file, rows.rows, rows, 0, rule=parse_rule("round-robin"))
    times = [each.ttft_s for each in result.outcomes if each.number >= 40 and each.ttft_s is not None]
    assert len(times) == 40
    assert found.ttft_ms[0] == pytest.approx(sum(times) / 40 * 1e3)
    arrivals_s = rows.rows[79].at_s - rows.rows[40].at_s
    good = Objective(ttft_s=2.0, itl_s=0.05).are_met(result.outcomes.table()).tolist()[40:].count(True)
    assert found.good_per_s[0] == pytest.approx(good / arrivals_s)


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
    file = load_fleet(fleet("ab", 1.0, policy=None)).fleet
    result = replayed(file, thrice.rows, thrice, 0)
    arrived = {outcome.number: outcome.arrived_s for outcome in result.outcomes}
    ended = {outcome.number: outcome.arrived_s + (outcome.e2e_s or 0.0) for outcome in result.outcomes}
    followers = [row for row in thrice.rows if row.waits]
    assert followers
    for row in followers:
        (wait,) = row.waits
        assert arrived[row.number] == pytest.approx(ended[wait.number] + wait.think_s)


def test_seeds_without_effect_are_replayed_only_twice() -> None:
    rows = Rows(CASES[0], 3.0, 4)
    file = load_fleet(fleet("ab", 1.0, policy=None)).fleet
    one = summarize(replayed(file, rows.rows, rows, 0), Objective())
    other = msgspec.structs.replace(one, retried=one.retried + 1)
    asked: list[int] = []

    def same(seed: int) -> Summary:
        asked.append(seed)
        return one

    assert over_seeds(same, 5) == [one] * 5
    assert asked == [0, 1]
    assert over_seeds(lambda seed: other if seed else one, 3) == [one, other, other]
    assert over_seeds(lambda _seed: one, 1) == [one]


def test_a_stopped_replay_is_not_taken_as_complete() -> None:
    rows = Rows(CASES[0], 3.0, 4)

    def stopped() -> Iterator[TraceRequest]:
        yield rows.rows[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replayed(load_fleet(fleet("ab", 1.0, policy=None)).fleet, stopped(), rows, 0)


def test_only_a_static_split_fails_requests_without_its_zones_decoders() -> None:
    whole, together, apart = (
        zone_cell(ZoneJob(2, setup, loses, 60, 1))
        for setup, loses in ((SPLIT, False), (ONE, True), (SPLIT, True))
    )
    assert whole.failed == together.failed == (0,)
    assert apart.failed[0] > 10
    assert apart.good_per_s[0] < together.good_per_s[0]


def test_a_stopped_run_resumes_from_its_kept_results(tmp_path: Path) -> None:
    path = tmp_path / "short.kept"
    first, second = Done("one", 1.5, cells=(cell("lmetric", 2.0),)), Done("two", 0.5)
    KeptRun(path, HEAD).add(first)
    again = KeptRun(path, HEAD)
    assert again.done == {"one": first}
    with path.open("ab") as file:
        file.write(b'{"key": "cut o')
    onward = KeptRun(path, HEAD)
    onward.add(second)
    assert KeptRun(path, HEAD).done == {"one": first, "two": second}
    onward.remove()
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    "other",
    [
        Head("short", 3_000, 4, COMMIT),
        Head("short", 2_000, 5, COMMIT),
        Head("short", 3_000, 5, Commit("ba9876543210", changed=False)),
    ],
)
def test_results_kept_by_another_run_are_ignored(tmp_path: Path, other: Head) -> None:
    path = tmp_path / "short.kept"
    KeptRun(path, other).add(Done("one", 1.0))
    assert KeptRun(path, HEAD).done == {}
    path.write_text("no JSON\n")
    assert KeptRun(path, HEAD).done == {}


def test_the_page_shows_the_winner_and_its_margin() -> None:
    page = markdown(
        study(
            cell("kvrouter", 400.0),
            cell("kvrouter, tuned: kv_transfer_weight=30", 150.0),
            cell("lmetric", 100.0),
            cell("round-robin", 300.0),
            cell("kvrouter", 200.0, ratio=20.0),
            cell("kvrouter, tuned: required", 200.0, ratio=20.0),
            cell("lmetric, required", 50.0, ratio=20.0, failed=3),
            cell("round-robin, required", 500.0, ratio=20.0),
        ),
        [],
    )
    assert "| lmetric | 1 | 2 | 1.00 | 1.00 |" in page
    assert "| t | 2 | 1 | lmetric | 100 | kvrouter, tuned: kv_transfer_weight=30 | 1.50 | 3.00 |" in page
    assert "| t | 2 | 20 | kvrouter | 200 | round-robin, required | 2.50 | 2.50 |" in page
    lost = page[page.index("## Where ours loses") : page.index("## Plots")]
    assert re.findall(r"^\| t .*$", lost, re.M) == [
        "| t | 2 | 1 | kvrouter, tuned: kv_transfer_weight=30 | 150 | lmetric | 100 | 1.50 |"
    ]
    assert f"| 2 | {SPLIT} | there | 22 | 9 | 50.0 | 1.25 | 25.0 | 0 |" in page


def test_the_page_states_that_ours_loses_nowhere() -> None:
    page = markdown(study(cell("kvrouter, tuned: required", 1.0), cell("round-robin", 2.0)), [])
    assert "## Where ours loses\n\nNowhere.\n" in page


def test_the_tables_have_the_figures_of_every_policy() -> None:
    text = tables(study(cell("lmetric", 100.0), cell("kvrouter, tuned: required", 120.0)))
    assert text.index("| lmetric | 100 |") < text.index("| kvrouter, tuned: required | 120 |")
    assert "## t, 2 times as fast, all links alike" in text


def test_a_plot_cuts_long_bars_and_escapes_names() -> None:
    svg = plot("Times", [Group("g", [Bar("a<b", 1.0, "1 ms"), Bar("long", 40.0, "40 ms", is_ours=True)])])
    assert "a&lt;b" in svg
    assert "a<b" not in svg
    widths = [float(width) for width in re.findall(r'<rect x="410"[^>]* width="([\d.]+)"', svg)]
    assert widths[1] / widths[0] == pytest.approx(5.0)
    assert svg.count("<polygon") == 1
    assert plot("Nothing", [Group("g", [Bar("a", 0.0, "0")])]).count("<polygon") == 0


def test_a_written_studys_page_links_only_existing_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FORMS, "check", FORMS["check"]._replace(rows=8))
    todo: list[Job | ZoneJob] = [
        *zone_jobs(8, 2)[:2],
        Job(0, 3.0, "kvrouter", RATIOS[:1], 8, 2),
        Job(0, 3.0, "random", RATIOS[:1], 8, 2),
    ]
    kept = KeptRun(tmp_path / "check.kept", HEAD)
    for job in todo:
        kept.add(work(job))
    done = studied("check", COMMIT, todo, kept)
    assert [each.policy.partition(":")[0] for each in done.cells][3:] == [
        "kvrouter, tuned",
        done.cells[-1].policy,
    ]
    write(done, tmp_path)
    page = (tmp_path / "README.md").read_text()
    links = re.findall(r"\]\((results/[^)]+)\)", page)
    assert len(links) == 4
    assert [link for link in links if not (tmp_path / link).is_file()] == []
    read = msgspec.json.decode((tmp_path / "results" / "check.json").read_bytes(), type=Study)
    assert read == done


def test_a_case_reads_only_the_asked_number_of_rows() -> None:
    case = Case("few", CASES[0].path, (1.0,))
    assert [row.number for row in Rows(case, 1.0, 5).rows] == [0, 1, 2, 3, 4]
    assert Rows(case, 1.0, 5).half == 2


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

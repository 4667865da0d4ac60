"""Which pair, over which link: what is replayed, which bars are missed, what the page says."""

from pathlib import Path

import msgspec
import pytest

from benchmarks.choice import pairs_page
from benchmarks.choice.pairs import (
    AGGREGATED,
    ASSUMED,
    AT_ONCE,
    BAR_SHARE,
    BLOCKS_RULE,
    EVEN,
    GIVEN,
    JOINT,
    LEARNED,
    NEVER,
    PRICED,
    TIME,
    PairCell,
    PairFigures,
    PairJob,
    jobs,
    measured,
)
from benchmarks.choice.pairs_page import (
    PairStudy,
    best_rule,
    gained,
    markdown,
    missed_of,
    shifted,
    upper_bound,
)
from benchmarks.http_replay.machine import Commit, Machine
from kvrouter.sim.rules.registry import RULES

RESULTS = Path(pairs_page.__file__).parent


def figures(
    policy: str,
    ttft: float,
    p99: float = 100.0,
    itl: float = 8.0,
    good: float = 1.0,
    *,
    links: str = GIVEN,
    cost: float = 0.0,
) -> PairFigures:
    return PairFigures(
        policy=policy,
        links=links,
        ttft_ms=(ttft, ttft),
        ttft_p99_ms=(p99, p99),
        itl_ms=(itl, itl),
        good=(good, good),
        failed=(0, 0),
        cost=(cost, cost),
    )


def cell(study: str, *of: PairFigures, fleet: str = "tiers", case: int = 0) -> PairCell:
    return PairCell(study=study, case=case, fleet=fleet, share=BAR_SHARE, load=2.0, figures=of)


def links(ours: PairFigures, *, learned: float = 90.0, fleet: str = "tiers") -> PairCell:
    time = (figures(TIME, 80.0), figures(TIME, learned, links=LEARNED), figures(TIME, 280.0, links=ASSUMED))
    joint = (
        ours,
        figures(EVEN, 110.0),
        figures(JOINT, 80.0, links=LEARNED),
        figures(JOINT, 80.0, links=ASSUMED),
    )
    rules = (figures("a", 100.0, 100.0), figures("b", 120.0, 90.0))
    return cell("links", *joint, *time, figures(BLOCKS_RULE, 900.0), *rules, fleet=fleet)


def test_every_study_has_a_distinct_key() -> None:
    assert len({job.key for job in jobs(3000, 10, range(4))}) == 4 * 5


@pytest.mark.parametrize("study", ["links", "a link at a tenth", "prices", "local prefill"])
def test_each_study_replays_what_it_compares(study: str) -> None:
    fleets = {"links": "tiers", "prices": "alike"}
    cells = measured(PairJob(study, 0, fleets.get(study, "two zones"), 60, 2))
    for found in cells:
        n_seeds = 2 if found.share in (0.0, BAR_SHARE) else 1
        assert all(len(each.ttft_ms) == n_seeds for each in found.figures)
        asked = {(each.policy, each.links) for each in found.figures}
        assert (JOINT, GIVEN) in asked
    if study == "links":
        assert [found.share for found in cells] == [0.5, 0.8, 1.1]
        assert [len(found.figures) for found in cells] == [4, 9, 4]
        assert best_rule(cells[1]).policy.partition(":")[0] in RULES


def test_differing_links_have_bars_for_the_best_rule_and_learning() -> None:
    assert missed_of(links(figures(JOINT, 82.0, 80.0))) == []
    slower = missed_of(links(figures(JOINT, 83.0, 81.0), learned=91.0))
    assert [text.partition(" ")[0] for text in slower] == ["mean", "p99", "learned"]
    assert gained(links(figures(JOINT, 82.0), learned=91.0)) == pytest.approx(0.945)


def test_equal_links_have_an_upper_bound_of_the_loss() -> None:
    alike = links(figures(JOINT, 101.0, 103.0), fleet="alike")
    assert missed_of(alike) == []
    worse = links(figures(JOINT, 102.0, 104.0, 8.2, 0.98), fleet="alike")
    assert [text.partition(" up to")[0] for text in missed_of(worse)] == [
        "mean TTFT",
        "mean ITL",
        "requests not good",
        "p99 TTFT",
    ]
    assert upper_bound((1.0, 1.1), (1.0, 1.0)) == pytest.approx(0.05 + 1.96 * 0.05)


def test_falls_prices_and_local_prefill_have_their_own_bars() -> None:
    def fall(seen: float) -> PairCell:
        of = [
            figures(policy, ttft, links=known)
            for policy in (JOINT, TIME)
            for known, ttft in ((AT_ONCE, 100.0), (GIVEN, seen), (NEVER, 200.0))
        ]
        return cell("a link at a tenth", *of)

    assert missed_of(fall(110.0)) == []
    assert len(missed_of(fall(111.0))) == 2
    assert shifted(fall(150.0), JOINT) == pytest.approx(0.5)
    free = figures(JOINT, 1.0, cost=10.0)
    assert missed_of(cell("prices", free, figures(PRICED, 1.0, 103.0, cost=1.0))) == []
    assert len(missed_of(cell("prices", free, figures(PRICED, 1.0, 104.0, cost=1.1)))) == 2
    others = (figures(TIME, 1.0, good=0.9), figures(TIME, 1.0, good=0.95, links=AGGREGATED))
    assert missed_of(cell("local prefill", figures(JOINT, 1.0, good=0.95), *others, case=1)) == []
    assert len(missed_of(cell("local prefill", figures(JOINT, 1.0, good=0.94), *others, case=1))) == 1


def test_the_page_has_the_setting_per_fleet_and_missed_bars() -> None:
    machine = Machine(cpu="a CPU", cores=2, system="Linux", python="3")
    cells = (links(figures(JOINT, 50.0, 81.0)), links(figures(JOINT, 60.0), fleet="alike"))
    text = markdown(PairStudy("short", "now", Commit("0123456789ab", False), machine, 3000, 2, cells))
    setting = "`--router-cost time --router-pd-selection joint`"
    assert f"| links differ (racks, zones) | {setting} | 0.50 to 0.50" in text
    assert f"| links are alike | {setting} | 0.60 to 0.60" in text
    assert "p99 TTFT 0.810 of a's, wanted 0.8" in text


def test_the_page_in_the_repository_matches_its_data() -> None:
    study = msgspec.json.decode((RESULTS / "results" / "pairs-short.json").read_bytes(), type=PairStudy)
    assert markdown(study) == (RESULTS / "pairs.md").read_text("utf-8")

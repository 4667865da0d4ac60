"""Which pair, over which link: what is replayed, which bars are missed, what the page says."""

import pytest

from benchmarks.choice.aggregated import BLOCKS_RULE, TIME
from benchmarks.choice.pairs import (
    ASSUMED,
    AT_ONCE,
    BAR_SHARE,
    EVEN,
    GIVEN,
    JOINT,
    LEARNED,
    NEVER,
    PRICED,
    PairCell,
    PairFigures,
    PairJob,
    jobs,
    measured,
)
from benchmarks.choice.pairs_page import (
    PairStudy,
    gained,
    markdown,
    missed_of,
    shifted,
)
from benchmarks.http_replay.machine import Commit, Machine
from benchmarks.replay.fleets import AGGREGATED, SAME_LINKS, TIERS


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
        good_per_s=(1.0, 1.0),
        cached=(0.5, 0.5),
        failed=(0, 0),
        cost=(cost, cost),
    )


def cell(study: str, *of: PairFigures, fleet: str = TIERS, case: int = 0) -> PairCell:
    return PairCell(study=study, case=case, fleet=fleet, share=BAR_SHARE, load=2.0, figures=of)


def links(ours: PairFigures, *, learned: float = 90.0, fleet: str = TIERS) -> PairCell:
    time = (figures(TIME, 80.0), figures(TIME, learned, links=LEARNED), figures(TIME, 280.0, links=ASSUMED))
    joint = (
        ours,
        figures(EVEN, 110.0),
        figures(JOINT, 80.0, links=LEARNED),
        figures(JOINT, 80.0, links=ASSUMED),
    )
    return cell("links", *joint, *time, figures(BLOCKS_RULE, 900.0), fleet=fleet)


def test_every_study_has_a_distinct_key() -> None:
    assert len({job.key for job in jobs(3000, 10, range(7))}) == 7 * 2 + 4 * 3


@pytest.mark.parametrize("study", ["links", "a link at a tenth", "prices", "local prefill"])
def test_each_study_replays_what_it_compares(study: str) -> None:
    fleets = {"links": TIERS, "prices": SAME_LINKS}
    cells = measured(PairJob(study, 0, fleets.get(study, "two zones"), 60, 2))
    for found in cells:
        n_seeds = 2 if found.share in (0.0, BAR_SHARE) else 1
        assert all(len(each.ttft_ms) == n_seeds for each in found.figures)
        asked = {(each.policy, each.links) for each in found.figures}
        assert (JOINT, GIVEN) in asked
    if study == "links":
        assert [found.share for found in cells] == [0.5, 0.8, 1.1]
        assert [len(found.figures) for found in cells] == [3, 8, 3]


def test_links_in_tiers_have_a_bar_for_learning() -> None:
    assert missed_of(links(figures(JOINT, 82.0))) == []
    (missed,) = missed_of(links(figures(JOINT, 82.0), learned=91.0))
    assert missed.startswith("learned links gain")
    assert gained(links(figures(JOINT, 82.0), learned=91.0)) == pytest.approx(0.945)
    assert missed_of(links(figures(JOINT, 82.0), learned=91.0, fleet=SAME_LINKS)) == []


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
    cells = (links(figures(JOINT, 50.0), learned=100.0), links(figures(JOINT, 60.0), fleet=SAME_LINKS))
    study = PairStudy(
        form="short",
        measured_at="now",
        commit=Commit("0123456789ab", False),
        machine=machine,
        rows=700,
        seeds=2,
        cells=cells,
    )
    text = markdown(study)
    setting = "`--router-pd-selection joint`"
    assert f"| links differ (racks, zones) | {setting} | 0.62 to 0.62" in text
    assert f"| links are alike | {setting} | 0.75 to 0.75" in text
    assert "learned links gain 95 % of what given ones do" not in text
    assert "learned links gain 90 % of what given ones do, wanted 95" in text

"""What other transfer policies change, and what follows from it."""

from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.core.constraints import RouterMode
from kvrouter.core.errors import ConfigError
from kvrouter.core.workers import Enforcement, Role
from kvrouter.fleetfile.fleet_checks import load_fleet
from kvrouter.fleetfile.fleet_workers import numbered_workers
from kvrouter.settings.problems import Document, parse_document
from kvrouter.sim.replay.carriage import Places
from kvrouter.sim.replay.summary import Objective
from kvrouter.sim.worth.advice import Alternative, Verdict, advise
from kvrouter.sim.worth.transfer_choices import TransferChoice, choice_of, other_choices, variant_of
from kvrouter.sim.worth.upgraded import AFTER, BEFORE, pair_capacity_of, parse_upgraded, upgraded_fleet
from kvrouter.sim.worth.worth import (
    FIGURES,
    PARTS,
    Change,
    FigureName,
    Floats,
    Rows,
    changes_of,
    check_length,
    compared_figures,
    figures_of,
    rows_of,
)
from tests.testing.replays import TWO_ZONES, fleet, replayed, row

KV = RouterMode.KV
HEAD = "version: 1\nmodels: [{name: m, block_size: 64}]\n"
RACKS = TWO_ZONES.replace("[zone]", "[zone, rack]")
PRICED = TWO_ZONES.replace("1310720.0}", "1310720.0, price_per_gb: 2}")
NO_LINKS = "topology: {levels: [zone]}\nworkers: [{name: p, role: prefill}, {name: d, role: decode}]"
BLOCKS = "blocks"
LEVELS = ("region", "zone", "rack")
TODAY = TransferChoice(KV, cost=BLOCKS)
PREFERRED = TransferChoice(KV, Enforcement.PREFERRED, "zone", 1.0, BLOCKS)
FALLBACK = TransferChoice(KV, Enforcement.FALLBACK, "zone", cost=BLOCKS)
REQUIRED = TransferChoice(KV, Enforcement.REQUIRED, "zone", cost=BLOCKS)


def document(text: str) -> Document:
    return parse_document(HEAD + text, "fleet.yaml")


def by_blocks(text: str) -> Document:
    """Where the text says nothing of the router."""
    return document(text if "router:" in text else f"router: {{router_cost: blocks}}\n{text}")


# Choices


def test_every_enforcement_level_mode_and_cost_is_an_alternative() -> None:
    file = load_fleet(by_blocks(f"kv_transfer: {{domain: rack}}{RACKS}")).fleet
    others = other_choices(file, tuple(RouterMode))
    assert choice_of(file) == TransferChoice(KV, Enforcement.REQUIRED, "rack", cost=BLOCKS)
    assert [choice.name for choice in others if choice.cost is BLOCKS] == [
        "anywhere, kv by blocks",
        "preferred 1 on zone, kv by blocks",
        "preferred 1 on rack, kv by blocks",
        "fallback on zone, kv by blocks",
        "fallback on rack, kv by blocks",
        "required on zone, kv by blocks",
    ]
    assert [choice.name for choice in others if choice.cost == "joint"] == [
        "anywhere, kv by joint",
        "preferred 1 on zone, kv by joint",
        "preferred 1 on rack, kv by joint",
        "fallback on zone, kv by joint",
        "fallback on rack, kv by joint",
        "required on zone, kv by joint",
        "required on rack, kv by joint",
    ]
    assert len(others) == 6 + 7 + 7 + 2 * 5
    assert {choice.enforcement for choice in others if choice.mode is RouterMode.RANDOM} == {
        None,
        Enforcement.FALLBACK,
        Enforcement.REQUIRED,
    }
    assert len(set(others)) == len(others)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("", "anywhere, kv by blocks"),
        (
            "kv_transfer: {domain: zone, enforcement: preferred, preferred_weight: 0.4}",
            "preferred 0.4 on zone, kv by blocks",
        ),
        ("router: {kv_transfer_topology_level: zone}", "required on zone, kv by time"),
        (
            "router: {kv_transfer_topology_level: zone, kv_transfer_mismatch_policy: fallback}",
            "fallback on zone, kv by time",
        ),
        ("router: {router_mode: random}", "anywhere, random"),
        ("router: {router_cost: time}", "anywhere, kv by time"),
        ("router: {router_cost: time, router_pd_selection: joint}", "anywhere, kv by joint"),
        ("router: {router_cost: lmetric}", "anywhere, kv by lmetric"),
        (
            "kv_transfer: {domain: zone}\nrouter: {kv_transfer_topology_level: zone, router_cost: blocks}",
            "required on zone, kv by blocks",
        ),
    ],
)
def test_todays_choice_is_read_from_the_file_and_variants_replace_it_whole(text: str, name: str) -> None:
    described = by_blocks(text + TWO_ZONES)
    today = choice_of(load_fleet(described).fleet)
    assert today.name == name
    for other in other_choices(load_fleet(described).fleet, tuple(RouterMode)):
        variant = variant_of(described, other)
        assert choice_of(variant.fleet) == other
        assert variant.fleet.workers == load_fleet(described).fleet.workers


def test_preferred_weight_of_the_file_is_tried() -> None:
    file = load_fleet(document(f"kv_transfer: {{domain: zone, preferred_weight: 0.3}}{TWO_ZONES}")).fleet
    assert {choice.weight for choice in other_choices(file, (KV,))} == {None, 0.3}


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("workers: [{name: w}]", "topology.levels"),
        (NO_LINKS, "topology.links"),
        (TWO_ZONES.replace("role: prefill, ", ""), "workers"),
        (RACKS.replace("zone, rack", ", ".join(["zone", *(f"l{n}" for n in range(13))])), "mode"),
    ],
)
def test_fleet_without_anything_to_compare_is_refused_by_field(text: str, field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        other_choices(load_fleet(document(text)).fleet, tuple(RouterMode))
    assert refused.value.param == field


# Changes


def rows(**columns: Floats) -> Rows:
    """A hundred requests that are alike, but for what is said."""
    zeros = np.zeros(100)
    made = Rows(ttft_ms=zeros + 100.0, good=zeros + 1.0, failed=zeros, crossing_gb=zeros, cost=zeros)
    return made._replace(**columns)


def test_changes_are_means_over_parts_and_totals_are_of_the_whole() -> None:
    ttft_ms = np.repeat(np.arange(10.0) * 2.0 + 101.0, 10)
    other = rows(ttft_ms=ttft_ms, crossing_gb=np.full(100, 0.5), good=np.tile([1.0, 0.0], 50))
    changes = changes_of([rows()], [other], FIGURES, 4)
    ttft = changes[FigureName.TTFT_MEAN]
    assert (ttft.today, ttft.change) == (100.0, 10.0)
    assert ttft.parts == tuple(range(1, 20, 2))
    assert ttft.within == pytest.approx(2.262 * np.std(ttft.parts, ddof=1) / 10**0.5, rel=1e-3)
    assert ttft.within_all > ttft.within
    assert ttft.share == pytest.approx(0.1)
    assert changes[FigureName.CROSSING].change == pytest.approx(50.0)
    assert changes[FigureName.CROSSING].share is None
    assert changes[FigureName.GOODPUT].change == -0.5
    assert changes[FigureName.FAILED] == Change(0.0, 0.0, 0.0, 0.0, (0.0,) * PARTS)


def test_refusing_slow_requests_does_not_count_as_faster() -> None:
    slow = np.tile([100.0, 900.0], 50)
    refusing = rows(ttft_ms=np.tile([100.0, np.nan], 50), failed=np.tile([0.0, 1.0], 50))
    changes = changes_of([rows(ttft_ms=slow)], [refusing], FIGURES, 1)
    assert changes[FigureName.TTFT_MEAN].change == 0.0
    assert changes[FigureName.FAILED].change == 0.5
    other_way = changes_of([refusing], [rows(ttft_ms=slow)], FIGURES, 1)
    assert other_way[FigureName.TTFT_MEAN] == Change(100.0, 0.0, 0.0, 0.0, (0.0,) * PARTS)
    nobody = changes_of([rows()], [rows(ttft_ms=np.full(100, np.nan))], FIGURES, 1)
    assert FigureName.TTFT_MEAN not in nobody
    assert FigureName.GOODPUT in nobody
    assert FigureName.TTFT_MEAN not in figures_of([rows(ttft_ms=np.full(100, np.nan))], FIGURES)


def test_percentiles_of_parts_need_as_many_requests_as_any() -> None:
    small = changes_of([rows()], [rows()], FIGURES, 1)
    assert FigureName.TTFT_P90 in small
    assert FigureName.TTFT_P99 not in small
    long = Rows(*(np.tile(column, PARTS) for column in rows()))
    slower = long._replace(ttft_ms=np.where(np.arange(1_000) % 100 < 2, 900.0, 100.0))
    changes = changes_of([long], [slower], FIGURES, 1)
    assert changes[FigureName.TTFT_P90].change == 0.0
    assert changes[FigureName.TTFT_P99].change == 800.0


def test_seeds_are_compared_pairwise_and_a_single_one_stands_for_all() -> None:
    today = [rows(ttft_ms=np.full(100, base)) for base in (100.0, 200.0, 300.0)]
    other = [rows(ttft_ms=np.full(100, base)) for base in (110.0, 210.0, 310.0)]
    ttft = changes_of(today, other, FIGURES, 1)[FigureName.TTFT_MEAN]
    assert (ttft.today, ttft.change, ttft.within) == (200.0, 10.0, 0.0)
    assert changes_of(today, [rows()], FIGURES, 1)[FigureName.TTFT_MEAN].change == -100.0
    assert figures_of(today, FIGURES)[FigureName.TTFT_MEAN] == 200.0


def test_rows_have_the_figures_crossing_and_cost_of_each_outcome() -> None:
    file = fleet(f"kv_transfer: {{domain: zone}}{PRICED}")
    workers = PRICED.splitlines(keepends=True)
    stranded = fleet(
        "".join(line for line in workers if "{name: da," not in line and "{name: pb," not in line)
    )
    trace = [row(0, 0.0, [1, 2, 3]), row(1, 40.0, [4, 5])]
    at_home = rows_of(replayed(trace, file).outcomes, Objective(), Places(file, "zone"))
    assert not at_home.crossing_gb.any()
    assert not at_home.cost.any()
    places = Places(stranded, "zone")
    away = rows_of(replayed(trace, stranded).outcomes, Objective(), places)
    assert away.crossing_gb.tolist() == pytest.approx([192 * 131_072 / 1e9, 128 * 131_072 / 1e9])
    assert away.cost.tolist() == pytest.approx([2 * gb for gb in away.crossing_gb])
    assert (at_home.good.tolist(), away.good.tolist()) == ([1.0, 1.0], [0.0, 0.0])
    assert not away.failed.any()
    assert away.ttft_ms[0] > away.ttft_ms[1] > at_home.ttft_ms[0]
    assert compared_figures(places) == FIGURES
    assert FigureName.COST not in {figure.name for figure in compared_figures(Places(fleet(TWO_ZONES)))}
    assert away.is_like(away)
    assert not away.is_like(at_home)


def test_trace_with_fewer_than_100_requests_is_refused() -> None:
    check_length(100)
    with pytest.raises(ConfigError, match="99 requests"):
        check_length(99)


# Advice


def change(today: float, by: float, within: float = 0.0, within_all: float | None = None) -> Change:
    return Change(today, by, within, within if within_all is None else within_all, (by,) * PARTS)


def alternative(
    choice: TransferChoice, changes: Mapping[FigureName, Change], today: TransferChoice = TODAY
) -> Alternative:
    """An alternative that changes nothing but what is said."""
    same = {
        FigureName.TTFT_MEAN: change(1_000.0, 0.0),
        FigureName.TTFT_P99: change(3_000.0, 0.0),
        FigureName.GOODPUT: change(0.8, 0.0),
        FigureName.FAILED: change(0.0, 0.0),
        FigureName.CROSSING: change(100.0, 0.0),
    }
    is_looser = choice.is_looser_than(today, LEVELS)
    return Alternative(choice.name, choice, is_looser, 1, {**same, **changes})


def verdict(*alternatives: Alternative, threshold: float = 0.02) -> Verdict:
    return advise(TODAY, alternatives, threshold, LEVELS).verdict


def test_clear_gain_of_ttft_or_goodput_is_advised() -> None:
    faster = alternative(REQUIRED, {FigureName.TTFT_MEAN: change(1_000.0, -400.0, 50.0, 90.0)})
    advice = advise(TODAY, [faster], 0.02, LEVELS)
    assert (advice.verdict, advice.choice) == (Verdict.SWITCH, REQUIRED)
    assert advice.sentences == (
        "Switch to required on zone, kv by blocks: mean TTFT falls by 400 ± 50 ms (40 %); "
        "nothing gets worse.",
    )
    assert verdict(alternative(REQUIRED, {FigureName.GOODPUT: change(0.8, 0.1, 0.02)})) is Verdict.SWITCH


@pytest.mark.parametrize(
    "ttft",
    [
        change(1_000.0, -400.0, 90.0, 401.0),  # may be chance among all alternatives
        change(1_000.0, -19.0),  # below the threshold
        change(1_000.0, 400.0),
        change(1_000.0, -1e-9),
    ],
)
def test_gain_that_may_be_chance_or_is_small_is_not_advised(ttft: Change) -> None:
    assert verdict(alternative(REQUIRED, {FigureName.TTFT_MEAN: ttft})) is Verdict.LEAVE
    assert verdict(alternative(REQUIRED, {FigureName.TTFT_MEAN: change(1_000.0, -20.0)})) is Verdict.SWITCH


@pytest.mark.parametrize(
    ("figure", "worse", "words"),
    [
        (FigureName.FAILED, change(0.0, 0.05, 0.01), "what fails or is refused rises by 5.0 ± 1.0 points"),
        (FigureName.TTFT_P99, change(3_000.0, 500.0, 100.0), "p99 TTFT rises by 500 ± 100 ms (17 %)"),
        (FigureName.GOODPUT, change(0.8, -0.1, 0.05), "goodput falls by 10.0 ± 5.0 points"),
        (FigureName.COST, change(2.0, 1.0, 0.5), "the cost rises by 1.00 ± 0.50 (50 %)"),
    ],
)
def test_gain_that_worsens_another_figure_is_not_advised_with_the_reason(
    figure: FigureName, worse: Change, words: str
) -> None:
    gain = {FigureName.TTFT_MEAN: change(1_000.0, -400.0, 50.0)}
    advice = advise(TODAY, [alternative(REQUIRED, {**gain, figure: worse})], 0.02, LEVELS)
    assert (advice.verdict, advice.choice, advice.worse) == (Verdict.LEAVE, None, (REQUIRED.name,))
    assert words in " ".join(advice.sentences)
    unsure = change(worse.today, worse.change, abs(worse.change) * 1.01)
    assert verdict(alternative(REQUIRED, {**gain, figure: unsure})) is Verdict.SWITCH


def test_lower_cost_at_equal_latency_is_advised_as_cheaper() -> None:
    saving = {FigureName.COST: change(10.0, -6.0, 1.0)}
    ttft = {FigureName.TTFT_MEAN: change(1_000.0, -5.0, 20.0)}
    advice = advise(TODAY, [alternative(REQUIRED, {**saving, **ttft})], 0.02, LEVELS)
    assert (advice.verdict, advice.choice) == (Verdict.CHEAPER, REQUIRED)
    assert "the cost falls by 6.00 ± 1.00 (60 %)" in advice.sentences[0]
    # TTFT is not known to be worse, and not known to be within 2 % either
    unknown = {FigureName.TTFT_MEAN: change(1_000.0, 5.0, 20.0)}
    assert verdict(alternative(REQUIRED, {**saving, **unknown})) is Verdict.LEAVE
    small = {FigureName.COST: change(10.0, -0.1, 0.01)}
    assert verdict(alternative(REQUIRED, {**small, **ttft})) is Verdict.LEAVE


def test_less_crossing_without_prices_is_reported_and_not_advised() -> None:
    less = alternative(PREFERRED, {FigureName.CROSSING: change(100.0, -80.0, 10.0)})
    advice = advise(TODAY, [less], 0.02, LEVELS)
    assert advice.verdict is Verdict.LEAVE
    assert "KV that crosses falls by 80.0 ± 10.0 GB (80 %)" in advice.sentences[-1]
    assert "price_per_gb" in advice.sentences[-1]


def test_least_changing_of_equally_good_alternatives_is_advised() -> None:
    def faster(choice: TransferChoice, by: float) -> Alternative:
        return alternative(choice, {FigureName.TTFT_MEAN: change(1_000.0, by, 20.0)})

    other_mode = TransferChoice(RouterMode.ROUND_ROBIN)
    alike = [faster(other_mode, -399.0), faster(REQUIRED, -400.0), faster(FALLBACK, -390.0)]
    advice = advise(TODAY, [*alike, faster(PREFERRED, -300.0)], 0.02, LEVELS)
    assert advice.choice == FALLBACK
    assert advice.as_good == (other_mode.name, REQUIRED.name)
    other_cost = TransferChoice(KV, cost="time")
    assert advise(TODAY, [*alike, faster(other_cost, -395.0)], 0.02, LEVELS).choice == other_cost
    strict = TransferChoice(KV, Enforcement.FALLBACK, "zone", cost="time")
    assert advise(TODAY, [*alike, faster(strict, -410.0)], 0.02, LEVELS).choice == FALLBACK
    assert advise(TODAY, [*alike, faster(PREFERRED, -381.0)], 0.02, LEVELS).choice == PREFERRED
    both_changed = TransferChoice(KV, Enforcement.PREFERRED, "zone", 1.0, "time")
    few = [faster(both_changed, -400.0), faster(REQUIRED, -400.0)]
    assert advise(TODAY, few, 0.02, LEVELS).choice == REQUIRED
    assert advise(TODAY, [], 0.02, LEVELS).verdict is Verdict.LEAVE


@pytest.mark.parametrize(
    ("choice", "is_looser"),
    [
        (TODAY, True),
        (PREFERRED, True),
        (FALLBACK, False),
        (REQUIRED, False),
        (TransferChoice(RouterMode.RANDOM, Enforcement.REQUIRED, "zone"), False),
        (TransferChoice(KV, Enforcement.REQUIRED, "rack", cost=BLOCKS), False),
        (TransferChoice(KV, Enforcement.PREFERRED, "rack", 1.0, BLOCKS), True),
        (TransferChoice(KV, Enforcement.REQUIRED, "region", cost=BLOCKS), True),
    ],
)
def test_choice_is_looser_by_enforcement_or_by_a_broader_domain(
    choice: TransferChoice, is_looser: bool
) -> None:
    assert choice.is_looser_than(FALLBACK, LEVELS) is is_looser
    assert not choice.is_looser_than(TODAY, LEVELS)


def test_looser_choice_is_never_advised_however_much_faster_it_is() -> None:
    gain = {FigureName.TTFT_MEAN: change(1_000.0, -900.0, 20.0)}
    free = alternative(TODAY, gain, REQUIRED)
    alone = advise(REQUIRED, [free], 0.02, LEVELS)
    assert (alone.verdict, alone.choice, alone.looser) == (Verdict.LEAVE, None, (TODAY.name,))
    assert alone.sentences[0].startswith("Leave it: nothing that keeps required on zone makes mean TTFT or")
    assert advise(REQUIRED, [], 0.02, LEVELS).sentences[0].startswith("Leave it: nothing makes mean TTFT or")
    assert alone.sentences[-1] == (
        "Better, and never advised, because it loosens required on zone: anywhere, kv by blocks."
    )
    assert "Nearest" not in " ".join(alone.sentences)
    by_time = TransferChoice(KV, Enforcement.REQUIRED, "zone", cost="time")
    less = alternative(by_time, {FigureName.TTFT_MEAN: change(1_000.0, -100.0, 20.0)}, REQUIRED)
    both = advise(REQUIRED, [free, less], 0.02, LEVELS)
    assert (both.verdict, both.choice, both.looser) == (Verdict.SWITCH, by_time, (TODAY.name,))


_CHOICES = st.one_of(
    st.builds(TransferChoice, st.sampled_from(RouterMode), cost=st.sampled_from(["blocks", "time"])),
    st.builds(
        TransferChoice,
        st.sampled_from(RouterMode),
        st.sampled_from(Enforcement),
        st.sampled_from(LEVELS),
        cost=st.sampled_from(["blocks", "time"]),
    ),
)


@given(_CHOICES, st.lists(st.tuples(_CHOICES, st.integers(-900, 100)), max_size=8))
def test_advice_is_never_looser_than_today(
    today: TransferChoice, others: list[tuple[TransferChoice, int]]
) -> None:
    alternatives = [
        alternative(choice, {FigureName.TTFT_MEAN: change(1_000.0, float(by), 20.0)}, today)
        for choice, by in others
    ]
    advice = advise(today, alternatives, 0.02, LEVELS)
    if advice.choice is not None:
        assert not advice.choice.is_looser_than(today, LEVELS)
        assert advice.choice.strictness >= today.strictness
    assert not {each.name for each in alternatives if each.is_looser} & {*advice.as_good}


SHARES = st.tuples(*2 * (st.integers(0, 4).map(lambda quarters: quarters / 4.0),))


@given(SHARES, st.lists(st.tuples(st.booleans(), st.sampled_from([4, 8]), st.sampled_from("ab")), min_size=1))
def test_an_upgraded_fleet_has_the_same_workers_of_two_versions(
    shares: tuple[float, float], groups: list[tuple[bool, int, str]]
) -> None:
    (_, first, zone), *others = groups
    kinds = [(True, first, zone), (False, first, zone), *others]
    lines = [
        f"- {{name: g{at}, role: {role}, replicas: {n}, domains: {{zone: {zone}}}}}"
        for at, (sends, n, zone) in enumerate(kinds)
        for role in ("prefill" if sends else "decode",)
    ]
    file = load_fleet(document("\n".join(["topology: {levels: [zone]}", "workers:", *lines]))).fleet
    found = upgraded_fleet(file, parse_upgraded("/".join(f"{share * 100.0}" for share in shares), file))
    before, after = (dict(numbered_workers(each)) for each in (file, found))
    assert [(id_, each.role, each.domains) for id_, each in before.items()] == [
        (id_, each.role, each.domains) for id_, each in after.items()
    ]
    for role, share in zip((Role.PREFILL, Role.DECODE), shares, strict=True):
        versions = [each.kv_format["version"] for each in after.values() if each.role is role]
        n_after = round(share * len(versions))
        assert versions == [AFTER] * n_after + [BEFORE] * (len(versions) - n_after)
    least = min(shares) + min(1.0 - share for share in shares)
    assert pair_capacity_of(found) == pytest.approx(least)


def test_workers_that_talk_to_any_version_do_so_amid_an_upgrade() -> None:
    text = """workers:
- {name: p, role: prefill, replicas: 4}
- {name: d, role: decode, replicas: 4, kv_format: {version: any}}"""
    file = load_fleet(document(text)).fleet
    assert pair_capacity_of(upgraded_fleet(file, parse_upgraded("50/0", file))) == 1.0


def test_an_upgrade_is_named_after_whole_workers_and_no_two_groups_are_alike() -> None:
    text = """workers:
- {name: p, role: prefill, replicas: 2}
- {name: p-after, role: prefill, replicas: 4}
- {name: d, role: decode}"""
    file = load_fleet(document(text)).fleet
    few, half = parse_upgraded("25/50", file), parse_upgraded("50", file)
    assert few.name == "2 of 6 prefill and 0 of 1 decode workers upgraded"
    assert half == parse_upgraded("50/40", file), "the same workers"
    names = [group.name for group in upgraded_fleet(file, half).workers]
    assert names == ["p-after-after", "p-after-after-after", "p-after", "d"]

"""The page of a replay: well-formed, escaped, and with every figure of every variant."""

import re
import subprocess
from collections import Counter
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import UndefinedError

import kvrouter
from kvrouter.sim.replay.comparison import COLUMNS, COST, MEANINGS
from kvrouter.sim.replay.summary import Carriage, ReplayReport
from kvrouter.sim.replay.timetable import TimetableEntry
from kvrouter.sim.replay.variant import VARIANTS_MAX
from kvrouter.sim.report.document import TEMPLATES, render_page
from kvrouter.sim.report.plot import HEIGHT, WIDTH, Line, Mark, Plot, Point
from kvrouter.sim.report.scale import (
    Scale,
    clock,
    latencies,
    latencies_over_time,
    linear,
    milliseconds,
    plain,
    shares,
)
from tests.testing.replay_reports import NOTHING, empty_summary, part, report, spread, summary, variant

Element = ElementTree.Element
EVIL = "<script>alert('a & \"b\"')</script>"
LATENCIES = ("Time to first token", "Between tokens", "End to end")
TWO = report(
    variant("kvrouter", [summary()]),
    variant("round-robin", [summary(2.0, errors={}, refusals={}, carried=())], source="load balancers"),
)
WHOLE = summary(completed=106, errors={}, refusals={})
FIVE_SEEDS = report(
    variant("kvrouter", [msgspec.structs.replace(WHOLE, errors={"no_eligible_worker": 6})] * 5),
    variant("round-robin", [summary(2.0, completed=106, errors={}, refusals={})] * 5),
)


def parsed(of: ReplayReport) -> Element:
    """The page as XML: whatever is not escaped or not closed fails here."""
    text = render_page(of).decode()
    assert text.startswith("<!DOCTYPE html>\n")
    return ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>\n"))


def drawn(plot: Plot) -> Element:
    return ElementTree.fromstring(TEMPLATES.get_template("parts.html").make_module().plot(plot))  # type: ignore[attr-defined]


def rendered(template: str, a: str | float) -> str:
    return TEMPLATES.from_string(template).render(a=a)


def words(found: Element) -> str:
    return " ".join("".join(found.itertext()).split())


def first(of: Element, tag: str) -> Element:
    return next(of.iter(tag))


def section(page: Element, title: str) -> Element:
    (found,) = [each for each in page.iter("section") if words(first(each, "h2")) == title]
    return found


def figures(of: Element) -> dict[str, Element]:
    return {words(first(each, "h3")): each for each in of.iter("figure")}


def series(of: Element) -> list[str]:
    """The names of a plot's lines."""
    return [words(each[0]) for each in of.iter("g")]


def rows(of: Element) -> list[list[str]]:
    return [[words(cell) for cell in row] for row in of.findall(".//tbody/tr")]


def bold_cells(of: ReplayReport) -> list[str]:
    (table,) = section(parsed(of), "Comparison").iter("table")
    return [words(cell) for cell in table.iter("td") if "best" in (cell.get("class") or "")]


def test_page_header_names_trace_dispatch_and_objectives() -> None:
    page = parsed(TWO)
    head = words(first(page, "header"))
    for said in (
        "day.jsonl",
        "traces/day.jsonl",
        "Mooncake",
        "by time stamp",
        "within 2 s",
        "0.05 s",
        "9.9",
        "106",
    ):
        assert said in head
    assert "Interrupted" not in head
    assert words(first(page, "title")) == "Replay of day.jsonl"
    stopped = parsed(report(variant("kvrouter", [summary(is_whole=False)]), is_whole=False))
    assert "Interrupted" in words(first(stopped, "header"))


def test_page_has_no_scripts_and_no_external_resources() -> None:
    page = parsed(TWO)
    assert {each.tag for each in page.iter()} & {
        "script",
        "link",
        "img",
        "iframe",
        "object",
        "image",
        "use",
    } == set()
    names = {name for each in page.iter() for name in each.attrib}
    assert not [name for name in names if name.startswith("on") or name in ("src", "href")]
    sheet = words(first(page, "style"))
    assert "url(" not in sheet
    assert "@import" not in sheet
    assert "prefers-color-scheme:dark" in sheet
    (policy,) = [each.get("content") for each in page.iter("meta") if each.get("http-equiv")]
    assert policy is not None
    assert "default-src 'none'" in policy
    assert "script-src" not in policy


def test_comparison_has_every_figure_of_every_variant() -> None:
    found = rows(section(parsed(TWO), "Comparison"))
    assert [row[0] for row in found] == ["kvrouter", "round-robin"]
    assert [len(row) for row in found] == [len(COLUMNS)] * 2
    assert found[0][1:4] == ["505*", "505*", "990*"]
    assert found[1][1:4] == ["1,010*", "1,010*", "1,980*"]
    assert found[0][11:] == ["6", "1.25", "5.2"]


def test_best_figure_is_bold_unless_variants_are_alike() -> None:
    (table,) = section(parsed(FIVE_SEEDS), "Comparison").iter("table")
    bold = [
        [cell.get("class") in ("best", "begins best") for cell in row] for row in table.findall(".//tbody/tr")
    ]
    first, second = bold
    assert first[1:4] == [True, True, True]
    assert second[1:4] == [False, False, False]
    assert not first[4]  # the same ITL
    assert second[11]  # fewer failed
    wide = [summary(1.0 + 0.05 * seed) for seed in range(5)]
    near = report(variant("a", wide), variant("b", [summary(0.01 + 1.0 + 0.05 * seed) for seed in range(5)]))
    assert bold_cells(near) == []


def test_figures_of_fewer_than_five_seeds_are_not_bold() -> None:
    four = report(*(variant(each.name, each.summaries[:4]) for each in FIVE_SEEDS.variants))
    assert bold_cells(FIVE_SEEDS)
    assert bold_cells(four) == []
    said = words(section(parsed(four), "Comparison"))
    assert "4 seeds" in said
    assert "Bold" not in said


def test_times_of_survivors_are_marked_with_their_counts_and_never_bold() -> None:
    drops = summary(0.1, completed=90, errors={"request_timeout": 16}, ttft_ms=spread(1.0, 100.0, samples=90))
    page = report(variant("drops", [drops] * 5), variant("whole", [WHOLE] * 5))
    table = section(parsed(page), "Comparison")
    dropping, whole = rows(table)
    assert (dropping[1], whole[1]) == ("50*", "505")
    assert dropping[7] == whole[7], "a share of all requests has no mark"
    assert "50*" not in bold_cells(page)
    assert "505" in bold_cells(page)
    assert "drops: TTFT of 90, ITL of 100, end to end of 100 of 106 requests" in words(table)
    assert "* of the answered requests alone" in words(table)
    assert "*" not in words(section(parsed(report(variant("whole", [WHOLE]))), "Comparison"))


def test_bar_of_a_collapsed_policy_is_cut_and_leaves_the_others_long() -> None:
    page = parsed(
        report(*(variant(name, [summary(by)]) for name, by in (("a", 1.0), ("b", 1.2), ("c", 90.0))))
    )
    ttft = figures(section(page, "At a glance"))["Time to first token, mean"]
    widths = [float(each.get("width") or 0) for each in ttft.iter("rect")][1::2]
    assert widths == [208.33, 250.0, 1_000.0]
    assert [each.get("class") for each in ttft.iter("path")] == ["gap"]
    assert "45,450* ms" in words(ttft)
    assert "cut, at 2,424 ms" in words(ttft)


def test_bars_show_each_figure_of_each_variant_against_the_ceiling() -> None:
    found = figures(section(parsed(TWO), "At a glance"))
    assert tuple(found) == (
        "Time to first token, mean",
        "Time to first token, p99",
        "Between tokens, mean",
        "Good requests",
        "Cached prompt tokens",
        "Imbalance",
        "KV crossing domains",
    )
    lengths = [each.get("width") for each in found["Time to first token, p99"].iter("rect")]
    assert lengths == ["1000", "500", "1000", "1000"]  # of each variant what is behind its bar, and the bar
    assert "990* ms" in words(found["Time to first token, p99"])
    cached = found["Cached prompt tokens"]
    assert "ceiling, 50.0 %" in words(cached)
    assert [each.get("x1") for each in cached.iter("line")] == ["500", "500"]
    assert [each.get("aria-label") for each in cached.iter("svg")] == [
        "kvrouter: 25.0 %",
        "round-robin: 25.0 %",
    ]


def test_seeds_give_intervals_and_shaded_ranges() -> None:
    page = parsed(report(variant("kvrouter", [summary(), summary(1.2), summary(1.4)])))
    ((_, mean, *_),) = rows(section(page, "Comparison"))
    assert mean == "606* ± 251"
    assert "3 seeds" in words(section(page, "At a glance"))
    assert "0 to 2" in words(first(page, "header"))
    for title in ("Distributions", "Over time"):
        bands = [each for each in section(page, title).iter("path") if each.get("class") == "band"]
        assert bands
        assert all((each.get("d") or "").endswith("Z") for each in bands)
    one = parsed(report(variant("kvrouter", [summary()])))
    assert not [each for each in one.iter() if each.get("class") in ("band", "within")]
    assert "One seed" in words(section(one, "At a glance"))


def test_confidence_interval_of_a_bar_is_drawn_around_its_end() -> None:
    page = parsed(report(variant("kvrouter", [summary(), summary(1.2), summary(1.4)])))
    mean = figures(section(page, "At a glance"))["Time to first token, mean"]
    (whisker,) = [each for each in mean.iter("line") if each.get("class") == "whisker"]
    _, bar = [float(each.get("width") or 0) for each in mean.iter("rect")]
    low, high = (float(whisker.get(name) or 0) for name in ("x1", "x2"))
    assert low < bar < high == 1_000.0
    assert bar - low == pytest.approx(high - bar, abs=0.1)


def test_each_latency_distribution_has_a_monotonic_line_per_variant() -> None:
    found = figures(section(parsed(TWO), "Distributions"))
    assert tuple(found) == LATENCIES
    for title, figure in found.items():
        (svg,) = figure.iter("svg")
        assert svg.get("role") == "img"
        assert title in (svg.get("aria-label") or "")
        assert sorted(series(svg)) == ["kvrouter", "round-robin"]
        for line in (each for each in svg.iter("path") if each.get("class") == "line"):
            points = places(line)
            assert len(points) == 101
            assert all(a[0] <= b[0] and a[1] >= b[1] for a, b in pairwise(points))
    assert "objective 2 s" in words(found["Time to first token"])
    assert "objective 50 ms" in words(found["Between tokens"])
    assert "objective" not in words(found["End to end"])


def test_plots_over_time_include_ceiling_and_arrivals() -> None:
    found = figures(section(parsed(TWO), "Over time"))
    assert tuple(found) == (
        *LATENCIES, "Good requests", "Goodput", "Cached prompt tokens", "Imbalance", "KV crossing", "Failed",
    )  # fmt: skip
    assert sorted(series(found["Cached prompt tokens"])) == ["ceiling", "kvrouter", "round-robin"]
    assert sorted(series(found["Goodput"])) == ["arrivals", "kvrouter", "round-robin"]
    other = report(
        variant("a", [summary()]),
        variant("b", [summary(parts=[part(at, ceiling_share=0.9) for at in range(24)])]),
    )
    cached = figures(section(parsed(other), "Over time"))["Cached prompt tokens"]
    assert sorted(series(cached)) == ["a", "a: ceiling", "b", "b: ceiling"]


def test_figures_without_any_events_have_no_plot() -> None:
    calm = [part(at, failed=0, crossing=0) for at in range(24)]
    page = parsed(report(variant("kvrouter", [summary(errors={}, refusals={}, carried=(), parts=calm)])))
    assert {"Failed", "KV crossing"} & set(figures(section(page, "Over time"))) == set()
    assert "KV crossing domains" not in figures(section(page, "At a glance"))
    assert "No KV went" in words(section(page, "KV between domains"))
    assert "Every request was answered" in words(section(page, "Errors and refusals"))


def test_parts_without_requests_or_figures_are_gaps_in_the_line() -> None:
    parts = [part(at, requests=0 if at in (3, 10, 12) else 4) for at in range(24)]
    parts[20] = part(20, ttft_ms=None)
    page = parsed(report(variant("kvrouter", [summary(parts=parts)])))
    (group,) = figures(section(page, "Over time"))["Time to first token"].iter("g")
    shapes = Counter(each.tag for each in group)
    assert shapes == {"title": 1, "path": 4, "circle": 1}
    assert [len(places(each)) for each in group.iter("path")] == [3, 6, 7, 3]


def test_empty_replay_and_missing_figures_still_make_a_page() -> None:
    page = parsed(report(variant("kvrouter", [empty_summary()])))
    ((_, *cells),) = rows(section(page, "Comparison"))
    assert cells[:6] == ["–"] * 6
    assert words(section(page, "Distributions")).count("Nothing to show.") == 3
    assert figures(section(page, "Over time"))
    mixed = parsed(
        report(variant("a", [summary(itl_ms=NOTHING)]), variant("b", [summary(), empty_summary()]))
    )
    assert sorted(series(figures(section(mixed, "Distributions"))["Time to first token"])) == ["a"]
    assert words(figures(section(mixed, "Distributions"))["Between tokens"]).endswith("Nothing to show.")
    assert "Nothing was replayed" in words(parsed(report(is_whole=False)))


def test_replay_of_a_single_moment_makes_a_page() -> None:
    parts = [part(at, begins_s=float(at), requests=int(at == 0)) for at in range(24)]
    same = spread(5.0, 5.0)
    page = parsed(report(variant("a", [summary(parts=parts, ttft_ms=same, itl_ms=spread(0.0, 0.0))])))
    assert [len(list(each.iter("circle"))) for each in figures(section(page, "Over time")).values()].count(
        0
    ) == 0
    assert tuple(figures(section(page, "Distributions"))) == LATENCIES


def test_kv_bytes_per_domain_pair_are_means_over_seeds_with_known_costs() -> None:
    second = summary(carried=(Carriage("a", "b", 50, 6_750_000_000),))
    page = parsed(report(variant("kvrouter", [summary(), second])))
    assert rows(section(page, "KV between domains")) == [
        ["kvrouter", "a", "a", "no", "20", "2.00"],
        ["kvrouter", "a", "b", "yes", "49", "6.00"],
    ]
    priced = (Carriage("a", "a", 1, 10**9), Carriage("a", "b", 2, 10**9, cost=0.5))
    page = parsed(report(variant("kvrouter", [summary(carried=priced)])))
    assert [row[-1] for row in rows(section(page, "KV between domains"))] == ["–", "0.50"]


def test_cost_column_is_shown_where_a_link_has_a_price() -> None:
    priced = variant("kvrouter", [summary(cost=1.25)])
    page = parsed(report(priced, variant("round-robin", [summary(cost=None)])))
    assert [row[-1] for row in rows(section(page, "Comparison"))] == ["1.25", "–"]
    assert "Cost of KV transfers" in figures(section(page, "At a glance"))
    for free in (None, 0.0):
        page = parsed(report(variant("kvrouter", [summary(cost=free)])))
        shown = rows(section(page, "Comparison"))[0]
        assert len(shown) == len(COLUMNS) + (free is not None)
        assert "Cost of KV transfers" not in figures(section(page, "At a glance"))
    assert COLUMNS[-1] is COST


def test_kv_cost_is_plotted_over_time_in_total_and_for_several_pairs() -> None:
    def over_time(*carried: Carriage) -> dict[str, Element]:
        parts = tuple(part(at, carried=carried if at == 1 else ()) for at in range(24))
        page = parsed(report(variant("kvrouter", [summary(carried=carried, parts=parts)])))
        return {
            title: plot
            for title, plot in figures(section(page, "Over time")).items()
            if title.startswith("Cost")
        }

    dear, cheap, free = (
        Carriage("a", "b", 1, 10**9, cost=0.5),
        Carriage("b", "a", 1, 10**9, cost=0.25),
        Carriage("b", "b", 1, 10**9),
    )
    assert over_time(free) == {}
    assert list(over_time(dear, free)) == ["Cost of KV transfers"]
    found = over_time(cheap, dear, free)
    assert list(found) == ["Cost of KV transfers", "Cost of KV from a to b", "Cost of KV from b to a"]
    ticks = [[text.text for text in plot.iter("text")][-1] for plot in found.values()]
    assert ticks == ["300", "200", "100"]  # 0.75, 0.5 and 0.25 in one part of 10 s
    many = [Carriage("a", str(n), 1, 1, cost=float(n)) for n in range(20)]
    assert list(over_time(*many))[1:] == [f"Cost of KV from a to {n}" for n in range(19, 13, -1)]


def test_events_are_numbered_marks_on_plots_and_rows_of_a_table() -> None:
    events = (
        TimetableEntry(30.0, "die", "group d"),
        TimetableEntry(31.0, "link", "zone a – b", "bandwidth × 0.1"),
        TimetableEntry(200.0, "join", "all workers"),
        TimetableEntry(1_000.0, "add", "group <d>", "2 workers more"),
    )
    page = parsed(report(variant("kvrouter", [summary()]), events=events))
    over_time = section(page, "Over time")
    for svg in over_time.iter("svg"):
        if svg.get("class") == "plot":
            lines = [each for each in svg.iter("line") if each.get("class") == "mark"]
            assert len(lines) == 3
            places = [float(line.get("x1", "0")) for line in lines]
            assert places == sorted(places)
            labels = [each.text for each in svg.iter("text") if each.get("class") == "mark-label"]
            assert labels == ["1–2", "3"]
    assert rows(over_time) == [
        ["1", "30 s", "die", "group d", "–"],
        ["2", "31 s", "link", "zone a – b", "bandwidth × 0.1"],
        ["3", "200 s", "join", "all workers", "–"],
        ["4", "1,000 s", "add", "group <d>", "2 workers more"],
    ]
    assert "numbered lines" in words(over_time)
    calm = section(parsed(TWO), "Over time")
    assert "numbered lines" not in words(calm)
    assert rows(calm) == []


@given(st.lists(st.floats(0.0, 240.0), min_size=1, max_size=40))
def test_mark_labels_never_overlap_and_leave_no_mark_out(values: list[float]) -> None:
    marks = [Mark(value, str(number)) for number, value in enumerate(sorted(values), 1)]
    lines = [Line("a", "v0", [[Point(0.0, 0.5), Point(240.0, 0.5)]])]
    made = drawn(Plot("a", clock(240.0), shares(), lines, marks))
    labels = [each for each in made.iter("text") if each.get("class") == "mark-label"]
    texts = [label.text or "" for label in labels]
    ends = [[int(end) for end in text.split("–")] for text in texts]
    assert [ends[0][0], ends[-1][-1]] == [1, len(marks)]
    assert all(before[-1] + 1 == after[0] for before, after in pairwise(ends))
    spans = [
        (float(label.get("x", "0")) - 3 * len(text), float(label.get("x", "0")) + 3 * len(text))
        for label, text in zip(labels, texts, strict=True)
    ]
    assert all(before[1] <= after[0] for before, after in pairwise(spans))
    assert all(low >= 0.0 and high <= WIDTH for low, high in spans)


def test_errors_and_refusals_are_listed_by_reason() -> None:
    second = summary(errors={"deadline_exceeded": 2}, refusals={})
    page = parsed(report(variant("kvrouter", [summary(), second]), variant("sticky", [summary()])))
    found = rows(section(page, "Errors and refusals"))
    assert [row[:3] for row in found] == [
        ["kvrouter", "error", "deadline_exceeded"],
        ["kvrouter", "error", "no_eligible_worker"],
        ["kvrouter", "refused", "domain_mismatch"],
        ["sticky", "error", "no_eligible_worker"],
        ["sticky", "refused", "domain_mismatch"],
    ]
    assert found[0][3].startswith("1.0 ± ")
    assert found[3][3:] == ["6", "5.7"]


@pytest.mark.parametrize("evil", [EVIL, "\x1b[31m\x00", "\udcff.jsonl", "]]>&amp;<!--", '" onload="x'])
def test_names_are_escaped_as_text_on_the_page(evil: str) -> None:
    carried = (Carriage(evil, "b", 1, 1_000),)
    page = parsed(
        report(
            variant(evil, [summary(carried=carried, errors={evil: 1}, refusals={evil: 1})], source=evil),
            variant("other", [summary()]),
            trace=f"folder/{evil.replace('/', '_')}",
        )
    )
    assert not list(page.iter("script"))
    assert not [name for each in page.iter() for name in each.attrib if name.startswith("on")]
    shown = words(ElementTree.fromstring(rendered("<p>{{ a }}</p>", evil)))
    assert words(section(page, "Where the policies are from")).count(shown) == 2
    assert rows(section(page, "KV between domains"))[0][:2] == [shown, shown]


@given(name=st.text(max_size=30), domain=st.text(max_size=10))
@settings(max_examples=60)
def test_any_name_gives_a_page(name: str, domain: str) -> None:
    carried = (Carriage(domain, name, 1, 1_000),)
    page = parsed(report(variant(name, [summary(carried=carried)]), trace=name))
    assert len(rows(section(page, "KV between domains"))) == 1


def test_maximum_number_of_variants_has_distinct_line_styles() -> None:
    page = parsed(report(*(variant(f"p{n}", [summary(1.0 + n / 10)]) for n in range(VARIANTS_MAX))))
    assert len(rows(section(page, "Comparison"))) == VARIANTS_MAX
    sheet = words(first(page, "style"))
    own = re.findall(r"\.v\d+\{(--own:[^}]*)\}", sheet)
    assert len(set(own)) == len(own) == VARIANTS_MAX


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_line_colours_contrast_with_their_background(scheme: int) -> None:
    sheet = words(first(parsed(TWO), "style"))
    root = re.findall(r":root\{([^}]*)\}", sheet)[scheme]
    colours = dict(re.findall(r"--(\w+):(#\w{6});", root))
    behind = luminance(colours["card"])
    for number in range(8):
        low, high = sorted((behind, luminance(colours[f"c{number}"])))
        assert (high + 0.05) / (low + 0.05) >= 3.0, number


def test_templates_escape_text_and_numbers_and_no_markup_twice() -> None:
    assert rendered("{{ a }}", "<b>") == "&lt;b&gt;"
    assert rendered("{% set b %}{{ a }}{% endset %}{{ b }}", "<") == "&lt;"
    assert rendered("{{ a }}", "\udcff\x00") == "\ufffd\ufffd"
    numbers = [rendered("{{ a }}", number) for number in (1_000, 0, 2.5, 1 / 3)]
    assert numbers == ["1000", "0", "2.5", "0.33"]
    assert rendered("<i>{{ a }}</i>{{ 'x' ~ a }}", "<&'") == "<i>&lt;&amp;&#39;</i>x&lt;&amp;&#39;"


def test_templates_are_packaged_files_and_a_missing_variable_is_an_error() -> None:
    """A wheel has what is under src/kvrouter and is no file that git ignores."""
    root = Path(kvrouter.__file__).parents[2]
    names = TEMPLATES.list_templates(extensions=["html", "css"])
    assert names == ["page.css", "page.html", "parts.html"]
    files = [f"src/kvrouter/sim/report/{name}" for name in names]
    tracked = subprocess.run(
        ["git", "ls-files", "--", *files], cwd=root, capture_output=True, text=True, check=True
    )
    assert tracked.stdout.split() == files
    with pytest.raises(UndefinedError, match="nowhere"):
        TEMPLATES.from_string("{{ nowhere }}").render()


def test_every_group_of_columns_has_a_meaning_on_the_page() -> None:
    groups = {re.sub(r" m?s$", "", column.group) for column in COLUMNS}
    assert {group for group in groups if not any(name.startswith(group) for name, _ in MEANINGS)} == set()


FINITE = st.floats(1e-3, 1e8)


@given(values=st.lists(FINITE, min_size=1, max_size=20))
def test_scales_hold_all_values_and_have_a_few_ordered_ticks(values: list[float]) -> None:
    for scale in (
        latencies(values),
        latencies_over_time(values),
        linear(max(values), plain),
        clock(max(values)),
    ):
        assert 2 <= len(scale.ticks) <= 8
        assert all(scale.low <= tick.value * (1 + 1e-9) for tick in scale.ticks)
        assert all(tick.value <= scale.high * (1 + 1e-9) for tick in scale.ticks)
        assert all(a.value < b.value for a, b in pairwise(scale.ticks))
        assert len({tick.label for tick in scale.ticks}) == len(scale.ticks)
        ordered = sorted(values)
        places = [scale.share(value) for value in ordered]
        assert places == sorted(places)
        assert 0.0 <= places[0] <= places[-1] <= 1.0
        if scale.low <= ordered[0]:
            assert (scale.share(scale.low), scale.share(scale.high)) == (0.0, 1.0)


def test_ticks_are_round_and_use_a_fitting_unit() -> None:
    assert [tick.label for tick in latencies([25.0, 5_000.0]).ticks] == [
        "30 ms",
        "100 ms",
        "300 ms",
        "1 s",
        "3 s",
    ]
    assert [tick.label for tick in latencies_over_time([100.0, 900.0]).ticks] == [
        "0", "200 ms", "400 ms", "600 ms", "800 ms", "1 s",
    ]  # fmt: skip
    assert [tick.label for tick in clock(3_600.0).ticks][:2] == ["0", "10 min"]
    assert clock(90_000.0).ticks[-1].label == "25 h"
    assert milliseconds(1_500_000.0) == "1,500 s"
    assert latencies([0.0, 5.0]).is_log is False


@given(
    points=st.lists(st.tuples(st.floats(-10, 300), st.floats(-1, 2)), min_size=1, max_size=9),
)
def test_lines_stay_within_the_plot(points: list[tuple[float, float]]) -> None:
    runs = [[Point(x, y) for x, y in points]]
    made = drawn(Plot("a", clock(240.0), shares(), [Line("l", "v0", runs, runs)]))
    for shape in made.iter("path"):
        for x, y in places(shape):
            assert 0 <= x <= WIDTH
            assert 0 <= y <= HEIGHT


def test_value_outside_a_scale_is_placed_at_its_end() -> None:
    scale = Scale(1.0, 100.0, (), is_log=True)
    assert [scale.share(value) for value in (0.0, 1.0, 10.0, 100.0, 1e9)] == [0.0, 0.0, 0.5, 1.0, 1.0]


def places(shape: Element) -> list[tuple[float, float]]:
    """The points of a path."""
    pairs = re.findall(r"(-?[\d.]+) (-?[\d.]+)", shape.get("d") or "")
    return [(float(x), float(y)) for x, y in pairs]


def luminance(colour: str) -> float:
    """WCAG's relative luminance of #rrggbb."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue

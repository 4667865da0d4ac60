"""The page of ``kvrouter replay --report``, as a real browser without a network shows it."""

import re
import shutil
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import pytest

from tests.system.browser.views import Look, View, look

SAMPLE = Path(__file__).parents[3] / "data" / "mooncake-conversation-sample.jsonl"
WIDTHS = (1280, 400)
VIEWS = [f"{scheme}-{width}" for scheme in ("light", "dark") for width in WIDTHS]
TITLES = (
    "At a glance",
    "Comparison",
    "Distributions",
    "Over time",
    "KV between domains",
    "Errors and refusals",
    "Where the policies are from",
    "What the figures mean",
)
EVENTS = """\
events:
- {at_s: 300, what: link, between: [a, b], bandwidth_factor: 0.1}
- {at_s: 1500, what: die, group: decode-b}
- {at_s: 1502, what: policy, set: {kv_transfer.enforcement: fallback}}
- {at_s: 2600, what: join}
- {at_s: 9000, what: label, group: prefill-b, set: {zone: a}}
"""
"""The second and the third are too near to each other for two labels; the last comes after the trace."""
PRICED = """\
version: 1
models: [{name: m}]
topology:
  levels: [zone]
  links: {across: {latency_s: 0.001, bandwidth_bytes_per_s: 1.0e9, price_per_gb: 0.02}}
kv_transfer: {domain: zone, enforcement: preferred, preferred_weight: 0.1}
workers:
- {name: prefill-a, role: prefill, domains: {zone: a}}
- {name: prefill-b, role: prefill, domains: {zone: b}}
- {name: decode-a, role: decode, domains: {zone: a}}
- {name: decode-b, role: decode, domains: {zone: b}}
"""
EVIL = "<img src=x onerror=alert(1)>.jsonl"
"""A trace's name that would run a script and ask for a picture, if it came to be markup."""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Look:
    folder = tmp_path_factory.mktemp("report")
    trace, page = folder / EVIL, folder / "out.html"
    shutil.copy(SAMPLE, trace)
    arguments = ["--rows", "40", "--compare", "kvrouter,round-robin", "--report", str(page)]
    subprocess.run([sys.executable, "-m", "kvrouter.cli", "replay", trace, *arguments], check=True)
    return look(page, folder, WIDTHS)


@pytest.fixture(scope="module")
def seen_with_events(tmp_path_factory: pytest.TempPathFactory) -> Look:
    folder = tmp_path_factory.mktemp("events")
    page, events, fleet = (folder / name for name in ("out.html", "events.yaml", "fleet.yaml"))
    events.write_text(EVENTS)
    fleet.write_text(PRICED)
    files = ["--fleet", str(fleet), "--events", str(events), "--report", str(page)]
    arguments = ["replay", str(SAMPLE), "--compare", "kvrouter,random", *files]
    subprocess.run([sys.executable, "-m", "kvrouter.cli", *arguments], check=True)
    return look(page, folder, WIDTHS)


def view_of(seen: Look, request: pytest.FixtureRequest) -> View:
    (found,) = [each for each in seen.views if f"{each.scheme}-{each.width}" == request.param]
    return found


@pytest.fixture(params=VIEWS)
def view(seen: Look, request: pytest.FixtureRequest) -> View:
    return view_of(seen, request)


@pytest.fixture(params=VIEWS)
def view_with_events(seen_with_events: Look, request: pytest.FixtureRequest) -> View:
    return view_of(seen_with_events, request)


def test_the_report_loads_without_complaints_or_requests(view: View) -> None:
    assert view.complaints == []
    assert view.requests == []
    assert view.title == f"Replay of {EVIL}"
    assert EVIL in view.text


def test_the_page_does_not_scroll_sideways(view: View) -> None:
    assert view.inner_width == view.width
    assert view.scroll_width <= view.inner_width
    for section in view.sections:
        assert section.box.x >= 0
        assert section.box.x + section.box.width <= view.width, section.title
    for table in view.tables:
        assert table.box.x + table.box.width <= view.width, table.label


def test_all_report_sections_have_their_text(view: View) -> None:
    assert tuple(section.title for section in view.sections) == TITLES
    (comparison,) = view.tables
    for text in ("kvrouter", "round-robin", "TTFT ms", "p99", "ceiling %", "imbalance", "KV crossing"):
        assert text in comparison.text
    assert len(re.findall(r"\d", comparison.text)) > 40
    for text in (
        "Mooncake",
        "by time stamp",
        "40 in each replay",
        "this router",
        "Every request was answered",
    ):
        assert text in view.text


def test_plots_are_visible_and_hold_their_lines_and_labels(view: View) -> None:
    assert len(view.plots) == 10
    for plot in view.plots:
        assert plot.box.width >= 300, plot.label
        assert plot.box.height >= 180, plot.label
        assert plot.box.x + plot.box.width <= view.width, plot.label
        assert plot.box.holds(plot.frame)
        assert {"kvrouter", "round-robin"} <= {shape.name for shape in plot.lines}, plot.label
        for shape in plot.lines:
            slack = 2.5 if shape.kind == "dot" else 1.0  # a dot at an end is half outside
            assert plot.frame.holds(shape.box, slack), f"{plot.label}: {shape.name}"
            assert "none" not in (shape.fill if shape.kind == "dot" else shape.stroke)
        for label in plot.texts:
            assert label.box.width > 0
            assert plot.box.holds(label.box), f"{plot.label}: {label.text}"
        for one, other in combinations(plot.texts, 2):
            assert not one.box.meets(other.box), f"{plot.label}: {one.text} and {other.text}"


def test_plot_lines_have_distinct_colours_and_highlight_on_hover(view: View) -> None:
    for plot in view.plots:
        colours = {shape.name: shape.stroke for shape in plot.lines if shape.kind == "line"}
        assert len(set(colours.values())) == len(colours), plot.label
    assert view.pointed == {"kvrouter": pytest.approx(0.1), "round-robin": 1.0}


def test_the_page_follows_the_readers_colour_scheme(view: View) -> None:
    background, ink = (sum(map(int, re.findall(r"\d+", colour))) for colour in (view.background, view.ink))
    assert background > 600 > 200 > ink if view.scheme == "light" else background < 200 < 600 < ink


def test_sections_and_plots_do_not_overlap(view: View) -> None:
    for one, other in combinations([section.box for section in view.sections], 2):
        assert not one.meets(other)
    for first, second in combinations([plot.box for plot in view.plots], 2):
        assert not first.meets(second)


def test_screenshots_of_all_views_are_not_blank(view: View) -> None:
    assert Path(view.picture).stat().st_size > 20_000


def test_events_are_shown_in_plots_over_time_and_in_a_table(view_with_events: View) -> None:
    over_time = [plot for plot in view_with_events.plots if " over time: " in plot.label]
    assert len(over_time) >= 9
    for plot in over_time:
        over = [text for text in plot.texts if text.box.y < plot.frame.y and text.box.x > plot.frame.x]
        assert [text.text for text in over] == ["1", "2–3", "4"]
        assert len(plot.marks) == 4
        for mark in plot.marks:
            assert plot.frame.holds(mark), plot.label
        for label in plot.texts:
            assert plot.box.holds(label.box), f"{plot.label}: {label.text}"
        for one, other in combinations(plot.texts, 2):
            assert not one.box.meets(other.box), f"{plot.label}: {one.text} and {other.text}"
    (table,) = [table for table in view_with_events.tables if table.label == "events"]
    for text in ("link", "a – b", "bandwidth × 0.1", "group decode-b", "fallback", "all workers", "9,000 s"):
        assert text in table.text
    assert view_with_events.scroll_width <= view_with_events.inner_width
    assert table.box.x + table.box.width <= view_with_events.width

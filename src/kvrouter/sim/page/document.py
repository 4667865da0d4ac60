"""The page as a whole: what was replayed, the figures, the plots, and what they mean."""

from collections.abc import Sequence
from pathlib import PurePath

from kvrouter.sim import comparison
from kvrouter.sim.page.charts import courses, distributions, legend
from kvrouter.sim.page.glance import panels
from kvrouter.sim.page.markup import Markup, element
from kvrouter.sim.page.style import sheet
from kvrouter.sim.page.tables import carried, reasons, timetable
from kvrouter.sim.page.tables import comparison as comparison_table
from kvrouter.sim.summary import PARTS, ReplayReport

POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
"""What a browser lets the page do: use its own styles, and nothing else."""

_TERMS = (
    ("TTFT, time to first token", "from a request's arrival to the first token of its answer"),
    ("ITL, between tokens", "the mean over an answer's tokens, for each request"),
    ("good, goodput", "requests that met the objective: their share, and how many a second"),
    ("cached", "the share of prompt tokens that engines found in their caches"),
    ("ceiling", "what an endless cache shared by all workers would have held of the same requests"),
    ("imbalance", "prefill tokens of the busiest worker over the mean of all that prefill; 1 is even"),
    ("KV crossing", "KV cache that went from one domain, such as a zone, to another"),
    ("cost", "what KV transfers cost by the prices of the fleet file's links, in its currency"),
    ("failed", "requests that ended with an error, those that were refused among them"),
)


def render_page(report: ReplayReport) -> bytes:
    """Return the page as one HTML file, which is well-formed XML too."""
    name = PurePath(report.trace).name
    variants = report.variants
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", f"Replay of {name}"),
        element("style", sheet(len(variants))),
    )
    main = element("main", _header(report, name), *_sections(report), *_explained(report))
    page = element("html", head, element("body", main), lang="en")
    return f"<!DOCTYPE html>\n{page}\n".encode()


def _header(report: ReplayReport, name: str) -> Markup:
    objective = report.objective
    seeds = sorted({seed for variant in report.variants for seed in variant.seeds})
    requests = max((s.requests for variant in report.variants for s in variant.summaries), default=0)
    facts = (
        ("Trace", report.trace),
        ("Format", report.format),
        ("Dispatch", report.dispatch),
        ("A good request", f"first token within {objective.ttft_s:g} s, tokens {objective.itl_s:g} s apart"),
        ("Requests", f"{requests:,} in each replay"),
        ("Seeds", _seeds(seeds)),
        *(("Recorded fleet", note) for note in report.notes),
        ("Made by", f"kvrouter {report.version}"),
    )
    warning = element(
        "p",
        element("strong", "Interrupted. "),
        "The last policy shows what was known until then, and policies after it are missing.",
        class_="warning",
        role="note",
    )
    return element(
        "header",
        element("p", "Replay", class_="kicker"),
        element("h1", name),
        *(() if report.is_whole else (warning,)),
        _list(facts, "facts"),
        element(
            "p",
            "The router's own decisions over mock engines on a simulated clock: compare the policies, and do "
            "not expect these latencies of your GPUs. Another dispatch may turn the ranking round.",
            class_="note",
        ),
    )


def _sections(report: ReplayReport) -> list[Markup]:
    variants = report.variants
    if not variants:
        return [_section("Nothing was replayed", "")]
    over_time = courses(variants, report.events)
    events = timetable(report.events)
    seeds = max(len(variant.seeds) for variant in variants)
    intervals = (
        f"Means over {seeds} seeds with 95 % intervals."
        if seeds > 1
        else "One seed: small differences may be chance."
    )
    bold = " Bold: the best, and all whose interval meets its own." if len(variants) > 1 else ""
    covered = " Shaded: what the seeds cover." if seeds > 1 else ""
    numbered = " The numbered lines are events, which stand in the table." if report.events else ""
    return [
        _section("At a glance", intervals, element("div", *panels(variants), class_="grid-of")),
        _section(
            "Comparison",
            f"{intervals}{bold}",
            comparison_table(variants),
        ),
        _section(
            "Distributions",
            f"Each line is a policy; the further left, the faster.{covered}",
            legend(variants),
            element("div", *distributions(variants, report.objective), class_="grid-of"),
        ),
        _section(
            "Over time",
            f"By when requests arrived, in {PARTS} parts of equal length.{covered}{numbered}",
            legend(variants),
            *(() if events is None else (events,)),
            element("div", *over_time, class_="grid-of"),
        ),
        _section(
            "KV between domains",
            "What went from worker to worker, by the domains of the transfer policy; means over seeds.",
            carried(variants) or element("p", "No KV went from worker to worker."),
        ),
        _section(
            "Errors and refusals",
            "Requests that did not end well. A refusal has the reason that ruled out the most workers.",
            reasons(variants) or element("p", "Every request was answered to its end."),
        ),
    ]


def _section(title: str, about: str, *content: Markup) -> Markup:
    return element("section", element("h2", title), element("p", about, class_="about"), *content)


def _explained(report: ReplayReport) -> tuple[Markup, ...]:
    sources = {variant.name: variant.source for variant in report.variants}
    return (
        _section("Where the policies are from", "", _list(tuple(sources.items()), "terms")),
        _section("What the figures mean", "", _list(_TERMS, "terms")),
    )


def _list(rows: Sequence[tuple[str, str]], class_: str) -> Markup:
    """Terms with what they mean."""
    items = (element("div", element("dt", term), element("dd", text)) for term, text in rows)
    return element("dl", *items, class_=class_)


def _seeds(seeds: Sequence[int]) -> str:
    if not seeds:
        return comparison.NOTHING
    return str(seeds[0]) if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"

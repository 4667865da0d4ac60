"""The page as a whole. Its templates are ``page.html``, ``parts.html`` and ``page.css``: all text that is put
into them is escaped, so that no name can become a tag.
"""

import re
from collections.abc import Sequence
from pathlib import Path, PurePath

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from kvrouter.sim.replay.comparison import (
    MEANINGS,
    NOTHING,
    SEEDS_MIN,
    least_seeds,
    seeds_note,
    times_notes,
)
from kvrouter.sim.replay.summary import PARTS, ReplayReport
from kvrouter.sim.report.charts import courses, distributions
from kvrouter.sim.report.glance import panels
from kvrouter.sim.report.series import style
from kvrouter.sim.report.tables import carried, comparison, reasons

_NOT_XML = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that no XML document may hold, among them surrogates for undecodable bytes of a path."""


def render_page(report: ReplayReport) -> bytes:
    """Return the page as one HTML file, which is well-formed XML too."""
    seeds = sorted({seed for variant in report.variants for seed in variant.seeds})
    page = TEMPLATES.get_template("page.html").render(
        report=report,
        name=PurePath(report.trace).name,
        requests=max((s.requests for variant in report.variants for s in variant.summaries), default=0),
        shown_seeds=_shown_seeds(seeds),
        sources={variant.name: variant.source for variant in report.variants},
    )
    return page.encode()


def shown(value: object) -> object:
    """Return a number as text, to a hundredth at most, and a text without the characters that XML cannot
    hold; markup is unchanged. The template escapes the text.
    """
    if hasattr(value, "__html__"):
        return value
    text = f"{float(value):.2f}".rstrip("0").rstrip(".") if isinstance(value, int | float) else str(value)
    return _NOT_XML.sub("\N{REPLACEMENT CHARACTER}", text)


def _shown_seeds(seeds: Sequence[int]) -> str:
    if not seeds:
        return NOTHING
    return str(seeds[0]) if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"


TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    finalize=shown,
    undefined=StrictUndefined,
    keep_trailing_newline=True,
    trim_blocks=True,
    lstrip_blocks=True,
)
TEMPLATES.globals |= {
    each.__name__: each
    for each in (
        *(carried, comparison, courses, distributions, panels, reasons, style),
        *(least_seeds, seeds_note, times_notes),
    )
} | {"MEANINGS": MEANINGS, "NOTHING": NOTHING, "PARTS": PARTS, "SEEDS_MIN": SEEDS_MIN}

"""The parts of a dashboard: panels, and what each asks of Prometheus.

In a query ``@fleet`` stands for the labels that the dashboard's variables pick, ``@model`` for these and
the model, ``@job`` for the job alone, and ``@rate`` for the window that Grafana picks.
"""

from dataclasses import dataclass
from enum import StrEnum


class PanelKind(StrEnum):
    """Grafana's name of a visualization."""

    LINES = "timeseries"
    NUMBER = "stat"
    HEATMAP = "heatmap"
    TABLE = "table"


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One query of a panel; ``legend`` may name labels as ``{{label}}``."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel; ``unit`` is Grafana's id of a unit."""

    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    kind: PanelKind = PanelKind.LINES
    width: int = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    """One dashboard, in the file ``uid``. ``variables`` are labels, each with a metric that has it."""

    uid: str
    title: str
    panels: tuple[Panel, ...]
    variables: tuple[tuple[str, str], ...] = (
        ("namespace", "kvrouter_build_info"),
        ("job", "kvrouter_build_info"),
        ("model", "kvrouter_requests_total"),
    )


def line(expr: str, legend: str) -> tuple[Query, ...]:
    return (Query(expr=expr, legend=legend),)


def quantiles(metric: str, labels: str = "@model", by: str = "") -> tuple[Query, ...]:
    """The median, the 90th and the 99th percentile of a histogram."""
    legend = "".join(f" {{{{{label.strip()}}}}}" for label in by.split(",") if label)
    grouped = f"le, {by}" if by else "le"
    return tuple(
        Query(
            expr=f"histogram_quantile({part}, sum by ({grouped}) (rate({metric}_bucket{{{labels}}}[@rate])))",
            legend=f"p{part * 100:.0f}{legend}",
        )
        for part in (0.5, 0.9, 0.99)
    )

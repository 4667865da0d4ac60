"""The table of a replay, for a terminal and for a README."""

from collections.abc import Mapping

from rich.table import Table

from benchmarks.replay.result import Latency, ModeResult, Report

Line = tuple[str, ...]


def lines(report: Report) -> list[Line]:
    """A header, then a line per measure with one cell per mode. Times are the fleet's own, in ms."""
    header = ("", *(str(result.mode) for result in report.modes))
    measures = [_measures(result, report) for result in report.modes]
    names = list(measures[0]) if measures else []
    return [header, *((name, *(cells[name] for cells in measures)) for name in names)]


def _measures(result: ModeResult, report: Report) -> dict[str, str]:
    transfers = sum(result.handoffs.values())
    return {
        "requests": f"{result.requests}",
        "errors": f"{result.errors}",
        "TTFT p50 / p99, fleet ms": _two(result.ttft, report.speedup),
        "TTFT p50 / p99, measured ms": _two(result.ttft, 1.0),
        "ITL p50, fleet ms": f"{result.itl.p50_ms * report.speedup:.1f}",
        "ITL p50, measured ms": f"{result.itl.p50_ms:.1f}",
        f"cached tokens (ceiling {report.ceiling:.1%})": f"{result.cached_share:.1%}",
        f"transfers across a {report.domain}": f"{result.crossed_handoffs} of {transfers}",
        "share per prefill worker": _range(result.prefill_share),
        "share per decode worker": _range(result.decode_share),
        "client late p99, measured ms": f"{result.late.p99_ms:.1f}",
        "duration, measured s": f"{result.duration_s:.0f}",
    }


def _two(latency: Latency, factor: float) -> str:
    return f"{latency.p50_ms * factor:.0f} / {latency.p99_ms * factor:.0f}"


def _range(shares: Mapping[str, float]) -> str:
    if not shares:
        return "–"
    return f"{len(shares)}: {min(shares.values()):.0%} – {max(shares.values()):.0%}"


def caption(report: Report) -> str:
    """What the table was measured with, in one sentence."""
    return (
        f"{report.rows} rows in {report.conversations} conversations, {report.compression:g} s of the trace "
        f"in 1 s of the fleet's time, speed-up {report.speedup:g}; commit {report.commit.id}"
        f"{' with changes' if report.commit.changed else ''}, {report.machine.cores} cores, "
        f"{report.machine.cpu}, Python {report.machine.python}"
    )


def markdown(report: Report) -> str:
    """The table as Markdown, with its caption below."""
    header, *body = lines(report)
    rule = ("---", *("---:" for _ in header[1:]))
    rows = ["| " + " | ".join(cells) + " |" for cells in (header, rule, *body)]
    return "\n".join([*rows, "", f"{caption(report)}.", ""])


def rich_table(report: Report) -> Table:
    """The table for a terminal; plain text where there is none."""
    header, *body = lines(report)
    table = Table(title="Replay of the trace sample", caption=caption(report))
    for number, name in enumerate(header):
        table.add_column(name, justify="right" if number else "left")
    for cells in body:
        table.add_row(*cells)
    return table

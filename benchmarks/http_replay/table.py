"""The table of a replay, for a terminal and for a README.

``python -m benchmarks.http_replay.table FILE…`` prints several runs as one table: the median and the spread.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import click
import msgspec
from rich.table import Table

from benchmarks.http_replay.result import Latency, ModeResult, Report
from benchmarks.results import spread

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


def markdown_of_runs(reports: Sequence[Report]) -> str:
    """Return several runs as a Markdown table: the median of their figures, and the least and the most.

    Raises ValueError when the runs replayed different rows or modes.
    """
    first = reports[0]
    same = ("rows", "conversations", "speedup", "compression", "ceiling", "domain")
    for report in reports[1:]:
        if any(getattr(report, name) != getattr(first, name) for name in same) or [
            result.mode for result in report.modes
        ] != [result.mode for result in first.modes]:
            raise ValueError("the runs did not replay the same rows in the same modes")
    header = ("", *(str(result.mode) for result in first.modes))
    by_mode = list(zip(*(report.modes for report in reports), strict=True))
    columns = [_measures_of_runs(runs, first) for runs in by_mode]
    body = [(name, *(column[name] for column in columns)) for name in columns[0]]
    rule = ("---", *("---:" for _ in header[1:]))
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *body))


def _measures_of_runs(runs: Sequence[ModeResult], report: Report) -> dict[str, str]:
    fleet = report.speedup
    crossed = sum(run.crossed_handoffs for run in runs)
    transfers = sum(sum(run.handoffs.values()) for run in runs)
    return {
        "requests / errors": f"{sum(run.requests for run in runs)} / {sum(run.errors for run in runs)}",
        "TTFT p50, ms of the fleet's time": spread([run.ttft.p50_ms * fleet for run in runs], ".0f"),
        "TTFT p99, ms of the fleet's time": spread([run.ttft.p99_ms * fleet for run in runs], ".0f"),
        "ITL p50, ms of the fleet's time": spread([run.itl.p50_ms * fleet for run in runs], ".1f"),
        f"cached tokens (an endless cache: {report.ceiling:.1%})": spread(
            [run.cached_share for run in runs], ".1%"
        ),
        f"KV transfers across a {report.domain}": f"{crossed} of {transfers}",
        "share per prefill worker": _widest([run.prefill_share for run in runs]),
        "share per decode worker": _widest([run.decode_share for run in runs]),
    }


def _widest(runs: Sequence[Mapping[str, float]]) -> str:
    shares = [share for run in runs for share in run.values()]
    return f"{min(shares):.0%}–{max(shares):.0%}" if shares else "–"


@click.command()
@click.argument(
    "paths", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
def main(paths: tuple[Path, ...]) -> None:
    """Print the replays at each of PATHS as one Markdown table."""
    try:
        reports = [msgspec.json.decode(path.read_bytes(), type=Report) for path in paths]
        click.echo(markdown_of_runs(reports))
    except ValueError as error:
        raise click.UsageError(str(error)) from None


if __name__ == "__main__":
    main()

"""``python -m benchmarks.markdown FILE…``: result files as the table of ``docs/benchmarks.md``."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import click

from benchmarks.results import Line, Measured, Result, read_result, spread


@click.command()
@click.argument(
    "paths", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
def main(paths: tuple[Path, ...]) -> None:
    """Print the result at each of PATHS in Markdown: one run, or the median of several and their spread."""
    results = [read_result(path) for path in paths]
    if len(results) == 1:
        click.echo(markdown_of(results[0]))
        return
    try:
        click.echo(markdown_of_runs(results))
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def markdown_of(result: Result) -> str:
    """Return the result as a Markdown table, with what it was measured with in a line above."""
    text = [
        _measured_with(result),
        "",
        "| row | variant | unit | ours p50 | p99 | peer | theirs p50 | p99 | ratio | wanted |",
        "|---|---|---|--:|--:|---|--:|--:|--:|--:|",
    ]
    for line in result.lines:
        theirs = ("", "") if line.theirs is None else _figures(line.theirs)
        ratio = "" if line.ratio is None else f"{line.ratio:.3f}"
        cells = (line.row, line.variant, line.unit, *_figures(line.ours), line.peer or "", *theirs)
        text.append(_row((*cells, ratio, _wanted(line))))
    return "\n".join(text)


def markdown_of_runs(results: Sequence[Result]) -> str:
    """Return several runs as a Markdown table: the median of their medians, and the least and the most.

    A ratio's median is that of the runs' ratios: the two sides of one ratio ran in turn, those of two runs
    did not. Raises ValueError when the runs have not the same lines.
    """
    text = [
        *(f"- {_measured_with(result)}" for result in results),
        "",
        "| row | variant | unit | ours p50 | peer | theirs p50 | ratio | wanted |",
        "|---|---|---|--:|---|--:|--:|--:|",
    ]
    for lines in zip(*(result.lines for result in results), strict=True):
        first = lines[0]
        if len({(line.row, line.variant, line.unit, line.peer) for line in lines}) > 1:
            raise ValueError(f"the runs differ: not each has the line {first.row!r}, {first.variant!r}")
        ours = _spread((line.ours.p50 for line in lines), 2)
        theirs = _spread((line.theirs.p50 for line in lines if line.theirs is not None), 2)
        ratio = _spread((line.ratio for line in lines if line.ratio is not None), 3)
        cells = (first.row, first.variant, first.unit, ours, first.peer or "", theirs, ratio)
        text.append(_row((*cells, _wanted(first))))
    return "\n".join(text)


def _measured_with(result: Result) -> str:
    machine, changed = result.machine, " with changes" if result.commit.changed else ""
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    return (
        f"`{result.name}` at `{result.commit.id}`{changed}, {result.measured_at}: {machine.cpu}, "
        f"{machine.cores} cores, {machine.system}, Python {machine.python}, "
        f"load {result.load_average[0]:.1f} at the start; {versions}."
    )


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _wanted(line: Line) -> str:
    return "" if line.wanted_ratio is None else f"≤ {line.wanted_ratio:g}"


def _figures(figures: Measured) -> tuple[str, str]:
    return f"{figures.p50:,.2f}", "" if figures.samples == 1 else f"{figures.p99:,.2f}"


def _spread(figures: Iterable[float], digits: int) -> str:
    found = list(figures)
    return spread(found, f",.{digits}f") if found else ""


if __name__ == "__main__":
    main()

"""``python -m benchmarks.markdown FILE``: a result file as the table of ``docs/benchmarks.md``."""

from pathlib import Path

import click

from benchmarks.results import Measured, Result, read_result


@click.command()
@click.argument("path", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def main(path: Path) -> None:
    """Print the result at PATH in Markdown."""
    click.echo(markdown_of(read_result(path)))


def markdown_of(result: Result) -> str:
    """Return the result as a Markdown table, with what it was measured with in a line above."""
    machine, changed = result.machine, " with changes" if result.commit.changed else ""
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    text = [
        f"`{result.name}` at `{result.commit.id}`{changed}, {result.measured_at}: {machine.cpu}, "
        f"{machine.cores} cores, {machine.system}, Python {machine.python}, "
        f"load {result.load_average[0]:.1f} at the start; {versions}.",
        "",
        "| row | variant | unit | ours p50 | p99 | beside | theirs p50 | p99 | ratio | wanted |",
        "|---|---|---|--:|--:|---|--:|--:|--:|--:|",
    ]
    for line in result.lines:
        theirs = ("", "") if line.theirs is None else _figures(line.theirs)
        ratio = "" if line.ratio is None else f"{line.ratio:.3f}"
        wanted = "" if line.wanted_ratio is None else f"≤ {line.wanted_ratio:g}"
        cells = (line.row, line.variant, line.unit, *_figures(line.ours), line.peer or "", *theirs)
        text.append("| " + " | ".join((*cells, ratio, wanted)) + " |")
    return "\n".join(text)


def _figures(figures: Measured) -> tuple[str, str]:
    return f"{figures.p50:,.2f}", "" if figures.samples == 1 else f"{figures.p99:,.2f}"


if __name__ == "__main__":
    main()

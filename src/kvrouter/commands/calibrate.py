"""``kvrouter calibrate``: the timing of a real engine from a measured run, and what it predicts."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from msgspec.structs import asdict
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvrouter.commands.whole_file import check_folder, write_whole
from kvrouter.config.setting import installed_version
from kvrouter.sim.calibration import Calibrated, Comparison, compare
from kvrouter.sim.calibration import calibrate as fit
from kvrouter.sim.measured_run import MeasuredRun, read_run
from kvrouter.sim.model_shape import model_shape

DIGITS = 6
"""A fitted figure has no more digits that mean anything."""


@dataclass(frozen=True, slots=True)
class CalibrateOptions:
    """What the command was given: ``n_seen`` requests are fitted to; ``model_config`` is the model's
    ``config.json`` from Hugging Face.
    """

    run: Path
    n_seen: int
    output: Path | None
    model_config: Path | None = None


def calibrate(options: CalibrateOptions, console: Console) -> None:
    """Fit, write the timing, and print predicted against measured.

    Raises ConfigError for a run that cannot be read or fitted to, before anything is written.
    """
    if options.output is not None:
        check_folder(options.output)
    run = read_run(options.run)
    shape, source = model_shape(run.meta.model, options.run, options.model_config)
    with Console(stderr=True).status("reading") as status:

        def show(number: int) -> None:
            status.update(f"fitting, round {number + 1}")

        calibrated = fit(run, shape, n_seen=options.n_seen, on_round=show)
        status.update("predicting")
        rows = compare(run, calibrated)
    lines = [
        f"{run.meta.model}: dimensions from {source}",
        *run.notes,
        *(f"guessed: {guess}" for guess in calibrated.guesses),
    ]
    if options.output is not None:
        document = timing_document(options.run.resolve().name, run.meta.model, calibrated, lines)
        write_whole(options.output, document.encode())
    show_comparison(options.run.resolve().name, run, calibrated, rows, console)
    for line in lines:
        console.print(Text(line))
    if options.output is not None:
        console.print(Text(f"{options.output}: for kvrouter replay --timing"))


def timing_document(source: str, model: str, calibrated: Calibrated, lines: Sequence[str]) -> str:
    """Return the timing of ``model`` fitted to ``source``, in YAML; comments are ``lines`` on how far it can
    be relied on, and what the engine of a fleet file needs besides.
    """
    config = calibrated.fitted
    figures = {name: float(f"{value:.{DIGITS}g}") for name, value in asdict(config.timing).items()}
    seen = f"the first {calibrated.n_seen} requests of" if calibrated.n_seen else "no request of"
    engine = {
        "total_kv_blocks": config.total_kv_blocks,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "chunked_prefill": config.chunked_prefill,
        "async_scheduling": config.async_scheduling,
    }
    said = yaml.safe_dump(engine, default_flow_style=True, sort_keys=False, width=1_000).strip()
    comments = "".join(f"# {line}\n" for line in lines)
    return (
        f"# kvrouter calibrate {installed_version()}: {model} by {seen} {source}\n"
        f"# The engine in a fleet file: {said}\n"
        f"# and the block_size of its model: {config.block_size}\n"
        f"{comments}"
        f"{yaml.safe_dump(figures, sort_keys=False)}"
    )


def show_comparison(
    source: str, run: MeasuredRun, calibrated: Calibrated, rows: Sequence[Comparison], console: Console
) -> None:
    """Print a row for each quantity and percentile of the requests that were not seen.

    What is expected of hardware alone has its columns where ``run`` says on what hardware it was measured.
    """
    seen = calibrated.n_seen
    table = Table(title=Text(f"{source}: {run.n_requests - seen} requests, predicted from {seen}"))
    table.add_column("quantity")
    expects = run.hardware is not None
    for column in ("", "measured s", "calibrated s", "error %"):
        table.add_column(column, justify="right")
    for column in ("no request seen s", "error %") if expects else ():
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row.quantity,
            f"p{row.percentile}",
            f"{row.measured_s:.4f}",
            f"{row.calibrated_s:.4f}" if seen else "–",
            _shown(row, row.error, row.calibrated_s) if seen else "–",
            *((f"{row.expected_s:.4f}", _shown(row, row.expected_error, row.expected_s)) if expects else ()),
            end_section=row is rows[-1] or row.quantity != rows[rows.index(row) + 1].quantity,
        )
    console.print(table)


def _shown(row: Comparison, error: float | None, predicted_s: float) -> str:
    """Return an error in percent; of a time that is shorter than a step the difference, in milliseconds."""
    if error is not None:
        return f"{100.0 * error:+.1f}"
    return f"{1e3 * (predicted_s - row.measured_s):+.1f} ms" if row.step_s > 0.0 else "–"

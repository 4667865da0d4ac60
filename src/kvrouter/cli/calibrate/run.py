"""``kvrouter calibrate``: the timing of a real engine from a measured run, and its predictions."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import yaml
from msgspec.structs import asdict
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvrouter.app.atomic_file import check_folder, write_atomic
from kvrouter.cli.calibrate.engine_description import with_metrics
from kvrouter.cli.calibrate.flags import CalibrateOptions
from kvrouter.cli.output import json_text
from kvrouter.cli.progress import working
from kvrouter.core.timing import Timing
from kvrouter.settings.setting import installed_version
from kvrouter.sim.calibrate.calibration import ERROR_MOST, Calibrated, Comparison, compare, missed
from kvrouter.sim.calibrate.calibration import calibrate as fit
from kvrouter.sim.calibrate.kv_blocks import KvBlocks
from kvrouter.sim.calibrate.measured_run import MeasuredRun, read_run
from kvrouter.sim.calibrate.model_shape import model_shape

DIGITS = 6
"""A fitted figure has no more digits that mean anything."""

NONE_SEEN = "no request was seen: expect errors of 10 to 90 %; --requests 30 fits to the engine's own"


def calibrate(folder: Path, options: CalibrateOptions, console: Console) -> None:
    """Fit to the run of a folder, write the timing, and print predicted against measured.

    Raises ConfigError for a run that cannot be read or fitted to, before anything is written.
    """
    if options.write_timing is not None:
        check_folder(options.write_timing)
    options.output.check()
    run = read_run(folder, with_cache=partial(with_metrics, folder / "metrics.txt"))
    shape, source = model_shape(run.meta.model, folder, options.model_config)
    with working("reading") as progress:

        def show(number: int) -> None:
            progress.show(f"fitting, round {number + 1}")

        calibrated = fit(run, shape, n_fitted=options.n_fitted, on_round=show)
        progress.show("predicting")
        notes = [f"{run.meta.model}: dimensions from {source}", *run.notes]
        fitted = fitted_to(folder.resolve().name, run.meta.model, run, calibrated, notes)
    deliver(fitted, options, console)


class Fitted(NamedTuple):
    """A fit of ``model`` to ``source``; ``lines`` state the basis of its figures, ``misses`` what it is far
    from, of the requests that it was fitted to or of those that it predicts.
    """

    source: str
    model: str
    run: MeasuredRun
    calibrated: Calibrated
    rows: Sequence[Comparison]
    misses: Sequence["Miss"]
    lines: Sequence[str]


def fitted_to(
    source: str, model: str, run: MeasuredRun, calibrated: Calibrated, notes: Sequence[str]
) -> Fitted:
    """Return ``calibrated`` with what it predicts of ``run``, and how far that can be relied on."""
    seen, rows = compare(run, calibrated)
    misses = [
        Miss(which, row.quantity, row.percentile, row.measured_s, row.calibrated_s, row.error or 0.0)
        for which, compared in (("seen", seen), ("predicted", rows))
        for row in missed(compared)
    ]
    lines = [*notes, calibrated.kv.line, *(f"guessed: {guess}" for guess in calibrated.guesses)]
    if not calibrated.n_fitted:
        lines.append(NONE_SEEN)
    if misses:
        of = ", ".join(each.text for each in misses)
        lines.append(f"MISSES by more than {ERROR_MOST:.0%}: {of}: do not rely on this timing")
    return Fitted(source, model, run, calibrated, rows, misses, lines)


def deliver(fitted: Fitted, options: CalibrateOptions, console: Console) -> None:
    """Write the timing if that is asked for, and print predicted against measured."""
    source, model, run, calibrated, rows, _, lines = fitted
    if options.write_timing is not None:
        write_atomic(options.write_timing, timing_document(source, model, calibrated, lines).encode())

    def draw() -> None:
        show_comparison(source, run, calibrated, rows, console)
        show_notes(lines, options.write_timing, console)

    report = calibration_report(fitted)
    options.output.show(lambda: json_text(report), draw)


def show_notes(lines: Sequence[str], written: Path | None, console: Console) -> None:
    """Print the basis of the figures, and where the timing is."""
    for line in lines:
        console.print(Text(line))
    if written is not None:
        console.print(Text(f"{written}: for kvrouter replay --timing"))


class ComparedFigure(msgspec.Struct, frozen=True):
    """One percentile of one quantity: seconds, and relative errors, which are None if a step's length was
    measured; ``calibrated_s`` is None without a fit.
    """

    quantity: str
    percentile: int
    measured_s: float
    calibrated_s: float | None
    calibrated_error: float | None
    expected_s: float
    expected_error: float | None


class Miss(msgspec.Struct, frozen=True):
    """A p50 or p90 of the requests ``seen`` or ``predicted`` that the calibrated engine is far from."""

    requests: str
    quantity: str
    percentile: int
    measured_s: float
    calibrated_s: float
    error: float

    @property
    def text(self) -> str:
        """What is missed, and by how much."""
        return f"{self.quantity} p{self.percentile} of requests {self.requests} {100.0 * self.error:+.1f} %"


class CalibrationReport(msgspec.Struct, frozen=True):
    """The report of a calibration, as written to JSON: the engine with its timing in milliseconds, and its
    predictions of requests that were not fitted to.
    """

    version: str
    source: str
    model: str
    seen_requests: int
    timing: Timing
    total_kv_blocks: int
    kv_blocks: KvBlocks
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    figures: tuple[ComparedFigure, ...]
    misses: tuple[Miss, ...]
    notes: tuple[str, ...]


def calibration_report(fitted: Fitted) -> CalibrationReport:
    """Return the result as JSON has it."""
    calibrated = fitted.calibrated
    config, is_fitted = calibrated.fitted, calibrated.n_fitted > 0
    return CalibrationReport(
        version=installed_version(),
        source=fitted.source,
        model=fitted.model,
        seen_requests=calibrated.n_fitted,
        timing=config.timing,
        total_kv_blocks=config.total_kv_blocks,
        kv_blocks=calibrated.kv,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        figures=tuple(
            ComparedFigure(
                quantity=row.quantity,
                percentile=row.percentile,
                measured_s=row.measured_s,
                calibrated_s=row.calibrated_s if is_fitted else None,
                calibrated_error=row.error if is_fitted else None,
                expected_s=row.expected_s,
                expected_error=row.expected_error,
            )
            for row in fitted.rows
        ),
        misses=tuple(fitted.misses),
        notes=tuple(fitted.lines),
    )


def timing_document(source: str, model: str, calibrated: Calibrated, lines: Sequence[str]) -> str:
    """Return the timing of ``model`` fitted to ``source``, in YAML; comments are ``lines`` on its
    reliability, and the other values for the engine of a fleet file.
    """
    config = calibrated.fitted
    figures = {name: float(f"{value:.{DIGITS}g}") for name, value in asdict(config.timing).items()}
    fitted_to = f"the first {calibrated.n_fitted} requests of" if calibrated.n_fitted else "no request of"
    engine = {
        "total_kv_blocks": config.total_kv_blocks,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "chunked_prefill": config.chunked_prefill,
        "async_scheduling": config.async_scheduling,
    }
    settings = yaml.safe_dump(engine, default_flow_style=True, sort_keys=False, width=1_000).strip()
    comments = "".join(f"# {line}\n" for line in lines)
    return (
        f"# kvrouter calibrate {installed_version()}: {model} by {fitted_to} {source}\n"
        f"# The engine in a fleet file: {settings}\n"
        f"# and the block_size of its model: {config.block_size}\n"
        f"{comments}"
        f"{yaml.safe_dump(figures, sort_keys=False)}"
    )


def show_comparison(
    source: str, run: MeasuredRun, calibrated: Calibrated, rows: Sequence[Comparison], console: Console
) -> None:
    """Print a row for each quantity and percentile of the requests that were not fitted to.

    The values expected from hardware alone have columns if ``run`` states its hardware.
    """
    n_fitted = calibrated.n_fitted
    table = Table(title=Text(f"{source}: {run.n_requests - n_fitted} requests, predicted from {n_fitted}"))
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
            f"{row.calibrated_s:.4f}" if n_fitted else "–",
            _shown(row, row.error, row.calibrated_s) if n_fitted else "–",
            *((f"{row.expected_s:.4f}", _shown(row, row.expected_error, row.expected_s)) if expects else ()),
            end_section=row is rows[-1] or row.quantity != rows[rows.index(row) + 1].quantity,
        )
    console.print(table)


def _shown(row: Comparison, error: float | None, predicted_s: float) -> str:
    """Return an error in percent; of a time that is shorter than a step the difference, in milliseconds."""
    if error is not None:
        return f"{100.0 * error:+.1f}"
    return f"{1e3 * (predicted_s - row.measured_s):+.1f} ms" if row.step_s > 0.0 else "–"

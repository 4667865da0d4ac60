"""What a command that takes a while is doing, on standard error: results on standard output stay clean."""

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SHOWN_AFTER_S = 0.5
REFRESH_INTERVAL_S = 0.2
"""On a terminal: when the line appears, and how often it is drawn again; it goes when the work ends."""

LOGGED_AFTER_S = 1.0
LOG_INTERVAL_S = 10.0
"""Elsewhere, such as in a job's log: when the first line is written, and how often one is after that."""


ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that end a process at once, unless it handles them."""

SIGNALLED = 128
"""A process that a signal ended has this and the signal's number for an exit code."""


class Progress:
    """The present step of a command's work, and how much of the whole is done."""

    def __init__(self, text: str, total: float | None) -> None:
        self.text = text
        self.done = 0.0
        self.total = total
        self._began_s = time.monotonic()

    def show(self, text: str | None = None, *, done: float | None = None) -> None:
        """Say what is done now, and how much of ``total`` is done; None leaves it as it is."""
        self.text = self.text if text is None else text
        self.done = self.done if done is None else done

    @property
    def line(self) -> str:
        """Return the progress as one line: the step, percent, seconds, and about how many are left."""
        passed_s = time.monotonic() - self._began_s
        if not self.total:
            return f"{self.text}: {passed_s:.0f} s"
        share = min(1.0, self.done / self.total)
        left = f", about {passed_s * (1.0 / share - 1.0):.0f} s left" if share else ""
        return f"{self.text}: {share:.0%}, {passed_s:.0f} s{left}"


@contextmanager
def working(text: str, *, total: float | None = None) -> Iterator[Progress]:
    """Show that the body works, and what at, where it takes longer than a moment."""
    progress, ended = Progress(text, total), threading.Event()
    show = _draw if sys.stderr.isatty() else _log
    thread = threading.Thread(target=show, args=(progress, ended), name="progress", daemon=True)
    thread.start()
    try:
        with ended_by_signals():
            yield progress
    finally:
        ended.set()
        thread.join()


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let signals that would end the process end the body as Ctrl-C does: a terminal is put back as it was.
    Signals with a handler, and those that are ignored, as SIGHUP is under nohup, are left alone.
    """
    is_main = threading.current_thread() is threading.main_thread()
    taken = [each for each in ENDING if is_main and signal.getsignal(each) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, _exit)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def _exit(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(SIGNALLED + number)


def _log(progress: Progress, ended: threading.Event) -> None:
    from kvrouter.cli.output import echo  # noqa: PLC0415

    wait_s = LOGGED_AFTER_S
    while not ended.wait(wait_s):
        echo(f"kvrouter: {progress.line}", err=True)
        wait_s = LOG_INTERVAL_S


def _draw(progress: Progress, ended: threading.Event) -> None:
    if ended.wait(SHOWN_AFTER_S):
        return
    from rich import progress as bars  # noqa: PLC0415

    from kvrouter.cli.console import error_console  # noqa: PLC0415

    columns = [bars.SpinnerColumn(), bars.TextColumn("{task.description}", markup=False)]
    if progress.total:
        columns.append(bars.BarColumn())
    with bars.Progress(
        *columns, console=error_console(), transient=True, auto_refresh=False, redirect_stdout=False
    ) as drawn:
        task = drawn.add_task(progress.line, total=progress.total)
        while True:
            drawn.update(task, description=progress.line, completed=progress.done, refresh=True)
            if ended.wait(REFRESH_INTERVAL_S):
                return

"""A supervisor of child processes: starts, restarts with backoff, stops."""

import asyncio
import ctypes
import logging
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from kvrouter.app.lifetime import LOST_PLACE
from kvrouter.core.backoff import Backoff, Failures
from kvrouter.telemetry import Event, log_event
from kvrouter.telemetry.logs import write_line

logger = logging.getLogger("kvrouter.up")

RESTART_AFTER_S = 1.0
"""The pause before an ended process is started again; it doubles while the process ends soon again."""

RESTART_MAX_S = 60.0

RUNS_WELL_S = 10.0
"""A process that ran for this long did not end soon."""

LAST_LINES_S = 1.0
"""Seconds that the last lines of an ended process may take to arrive."""

_PR_SET_PDEATHSIG = 1


def pause_after(failures: Failures, ran_s: float) -> float:
    """Return the pause in seconds after a process ran for ``ran_s``; a long run resets the backoff."""
    if ran_s >= RUNS_WELL_S:
        failures.reset()
    return failures.next_s()


def _restarts() -> Failures:
    return Failures(Backoff(RESTART_AFTER_S, RESTART_MAX_S))


@dataclass(slots=True)
class ChildProcess:
    """One child process; its name prefixes its log lines."""

    name: str
    command: Sequence[str]
    environ: Mapping[str, str]
    standby: Sequence[str]
    """Arguments added to its command once another process has replaced it."""
    is_quiet: bool
    process: Process | None = None
    failures: Failures = field(default_factory=_restarts)
    keeping: asyncio.Task[None] | None = None

    @property
    def is_running(self) -> bool:
        """Whether it was started and has not ended."""
        return self.process is not None and self.process.returncode is None


class Supervisor:
    """Starts processes, restarts those that end, and stops them all.

    A process that keeps ending, or cannot be started, is restarted after growing pauses. With
    ``prefix_lines`` their standard errors are copied to this process's, each line after the process's name.
    """

    def __init__(self, *, prefix_lines: bool) -> None:
        self._prefix_lines = prefix_lines
        self._children: list[ChildProcess] = []
        self._stopping = asyncio.Event()

    async def start(
        self,
        name: str,
        command: Sequence[str],
        environ: Mapping[str, str],
        *,
        standby: Sequence[str] = (),
        is_quiet: bool = False,
    ) -> ChildProcess:
        """Start a process that is to run until :meth:`stop`; its output is discarded where ``is_quiet``.

        Once it ended because another process replaced it, ``standby`` is added to its command.
        """
        child = ChildProcess(name, command, environ, standby, is_quiet)
        self._children.append(child)
        failure = await self._spawn(child)
        child.keeping = asyncio.get_running_loop().create_task(self._keep(child, failure))
        return child

    async def stop(self, prefix: str, limit_s: float) -> None:
        """Terminate the processes with names that begin with ``prefix``, and kill those that exceed the
        limit.

        From now on no other process is restarted either.
        """
        self._stopping.set()
        children = [child for child in self._children if child.name.startswith(prefix)]
        await asyncio.gather(*(_stop_one(child, limit_s) for child in children))

    async def _spawn(self, child: ChildProcess) -> OSError | None:
        """Start the process; return the error, or None."""
        stderr = DEVNULL if child.is_quiet else PIPE if self._prefix_lines else None
        try:
            child.process = await asyncio.create_subprocess_exec(
                *child.command,
                env=dict(child.environ),
                stdin=DEVNULL,
                stdout=DEVNULL if child.is_quiet else None,
                stderr=stderr,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        except OSError as error:
            child.process = None
            return error
        log_event(logger, Event.PROCESS_STARTED, process=child.name)
        if self._stopping.is_set():  # it was asked to end while it was being started
            _end(child)
        return None

    async def _keep(self, child: ChildProcess, failure: OSError | None) -> None:
        """Restart the process after each end, until all are stopped."""
        loop = asyncio.get_running_loop()
        while True:
            began_s = loop.time()
            code = None if child.process is None else await _ended(child.name, child.process)
            if self._stopping.is_set():
                return
            pause_s = pause_after(child.failures, loop.time() - began_s)
            if code is None:
                log_event(
                    logger,
                    Event.PROCESS_NOT_STARTED,
                    process=child.name,
                    reason=f"{failure}: tried again in {pause_s:g} s",
                )
            else:
                reason = f"{_why(code)}: started again in {pause_s:g} s"
                if code == LOST_PLACE and child.standby:
                    reason += ", to wait until its place is free"
                    child.command, child.standby = (*child.command, *child.standby), ()
                log_event(logger, Event.PROCESS_ENDED, process=child.name, exit_code=code, reason=reason)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._stopping.wait()
            if self._stopping.is_set():
                return
            failure = await self._spawn(child)


async def _ended(name: str, process: Process) -> int:
    """Copy the process's standard error until it has ended; return its exit code."""
    if process.stderr is None:
        return await process.wait()
    copying = copy_lines(name, process.stderr, lambda: process.returncode is None)
    lines = asyncio.get_running_loop().create_task(copying)
    try:
        code = await process.wait()
        await asyncio.wait({lines}, timeout=LAST_LINES_S)
    finally:
        lines.cancel()
    return code


async def _stop_one(child: ChildProcess, limit_s: float) -> None:
    if child.keeping is None:
        return
    _end(child)
    done, _ = await asyncio.wait({child.keeping}, timeout=limit_s)
    if not done and child.process is not None:
        with suppress(ProcessLookupError):
            child.process.kill()
    await child.keeping


def _end(child: ChildProcess) -> None:
    if child.process is not None and child.process.returncode is None:
        with suppress(ProcessLookupError):
            child.process.terminate()


def _why(code: int) -> str:
    """How a process ended, in words."""
    if code == LOST_PLACE:
        return "another process has its place"
    if code >= 0:
        return f"it ended with exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


async def copy_lines(name: str, lines: asyncio.StreamReader, is_running: Callable[[], bool]) -> None:
    """Copy a child's lines to this process's standard error, each after the child's name.

    A child blocks when its output is not read, so an overlong line is dropped and the next one is read. While
    nobody reads this process's, a running child's is not read either: its own log knows what to keep.
    """
    while True:
        try:
            line = await lines.readline()
        except ValueError:
            text = "… a line too long to show"
        else:
            if not line:
                return
            text = line.decode(errors="replace").rstrip()
        await write_line(f"{name} | {text}\n", is_running)


def _die_with_parent() -> None:
    """End with the parent, however it ends, kill -9 included (on Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

"""A supervisor of child processes: starts, restarts with backoff, stops."""

import asyncio
import ctypes
import logging
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from kvrouter.app.lifetime import LOST_PLACE
from kvrouter.core.backoff import Backoff, Failures
from kvrouter.telemetry import Event, log_event

logger = logging.getLogger("kvrouter.up")

RESTART_AFTER_S = 1.0
"""A process that ended by itself is started again after this time, and after twice the last time when it
ended soon again."""

RESTART_MAX_S = 60.0

RUNS_WELL_S = 10.0
"""A process that ran for so long did not end soon."""

LAST_LINES_S = 1.0
"""How long the last lines of a process that ended may take to come."""

_PR_SET_PDEATHSIG = 1


def pause_after(failures: Failures, ran_s: float) -> float:
    """Return the pause, in seconds, after a process that ran for ``ran_s``; a good run begins a new row."""
    if ran_s >= RUNS_WELL_S:
        failures.reset()
    return failures.next_s()


def _restarts() -> Failures:
    return Failures(Backoff(RESTART_AFTER_S, RESTART_MAX_S))


@dataclass(slots=True)
class ChildProcess:
    """One process, under the name that marks its lines."""

    name: str
    command: Sequence[str]
    environ: Mapping[str, str]
    standby: Sequence[str]
    """What is added to its command once another process has its place."""
    is_quiet: bool
    process: Process | None = None
    failures: Failures = field(default_factory=_restarts)
    keeping: asyncio.Task[None] | None = None

    @property
    def is_running(self) -> bool:
        """Whether it was started and has not ended."""
        return self.process is not None and self.process.returncode is None


class Supervisor:
    """Starts processes, starts them again when they end, and stops them all.

    One that ends, or cannot be started, again and again is tried after pauses that grow. With
    ``prefix_lines`` their standard errors come out of ours, each line after its process's name.
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
        """Start a process that is to run until the end; its output is discarded where ``is_quiet``.

        One that ends because another has its place is run with ``standby`` added from then on.
        """
        child = ChildProcess(name, command, environ, standby, is_quiet)
        self._children.append(child)
        failure = await self._spawn(child)
        child.keeping = asyncio.get_running_loop().create_task(self._keep(child, failure))
        return child

    async def stop(self, prefix: str, limit_s: float) -> None:
        """Ask the processes whose names begin with ``prefix`` to end, and kill those that do not.

        From now on none of the others is started again either.
        """
        self._stopping.set()
        children = [child for child in self._children if child.name.startswith(prefix)]
        await asyncio.gather(*(_stop_one(child, limit_s) for child in children))

    async def _spawn(self, child: ChildProcess) -> OSError | None:
        """Start the process; return why that failed."""
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
        """Wait for the process's end and start it again, until all are stopped."""
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
    """Copy what the process says until it has ended; return its exit code."""
    if process.stderr is None:
        return await process.wait()
    lines = asyncio.get_running_loop().create_task(copy_lines(name, process.stderr))
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


async def copy_lines(name: str, lines: asyncio.StreamReader) -> None:
    """A child's lines on our standard error, each after the child's name.

    A child whose output is not read blocks, so a line that is too long is dropped, and the next is read.
    """
    while True:
        try:
            line = await lines.readline()
        except ValueError:
            sys.stderr.write(f"{name} | … a line too long to show\n")
            continue
        if not line:
            return
        sys.stderr.write(f"{name} | {line.decode(errors='replace').rstrip()}\n")


def _die_with_parent() -> None:
    """Whatever ends this process, kill -9 included, ends its children too (on Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

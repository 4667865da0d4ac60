"""How a process of kvrouter lives: until SIGTERM or SIGINT; a second one ends it at once."""

import asyncio
import gc
import logging
import resource
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass

from kvrouter.telemetry import Event, log_event

logger = logging.getLogger("kvrouter.process")

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)

CONNECTIONS_MAX = 16_384
"""How many connections are taken where nobody says, and there is room for them."""

FILES_KEPT_MIN = 64
FILES_KEPT_MAX = 4096
FILES_UNLIMITED = 2**31
REFUSED_MAX = 64

LOST_PLACE = 3
"""The exit code of a worker whose place another start of its id has taken: one that is started again at once
would take it back, and so on for ever."""


class ToldToStop(Exception):
    """The process was told to stop while it was still starting."""


@contextmanager
def told_to_stop() -> Iterator[asyncio.Event]:
    """An event that is set when the process is told to stop. From then on the next signal ends it at once."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop() -> None:
        stopping.set()
        forget()

    def forget() -> None:
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)

    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, stop)
    try:
        yield stopping
    finally:
        forget()


@asynccontextmanager
async def unless_told(stopping: asyncio.Event) -> AsyncIterator[None]:
    """What takes long inside is given up when ``stopping`` is set. Raises ToldToStop then."""
    task = asyncio.current_task()
    is_told = False

    async def give_up() -> None:
        nonlocal is_told
        await stopping.wait()
        is_told = True
        if task is not None:
            task.cancel()

    giving_up = asyncio.get_running_loop().create_task(give_up())
    try:
        yield
    except asyncio.CancelledError:
        if is_told and task is not None and not task.uncancel():
            raise ToldToStop from None
        raise
    finally:
        giving_up.cancel()


def allow_many_files() -> int:
    """Let this process open as many files as the system allows it: a router has five for each worker, and a
    worker has strangers.

    The limit that processes begin with, often 1,024, is for those that use ``select``. Returns the limit.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # a system without a limit, or with one of its own below this
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return FILES_UNLIMITED if soft == resource.RLIM_INFINITY else soft


@dataclass(frozen=True, slots=True)
class Descriptors:
    """How many of this process's file descriptors are for those who connect to it."""

    files_max: int
    """How many there are in all."""

    connections_max: int
    """What was wanted, or as much of it as there is room for."""

    numbers_max: int
    """Descriptors from this number on are kept: the system gives the lowest that is free."""

    refused_max: int
    """How many of those that are kept may go to refused connections, until their clients have read why."""


def share_descriptors(connections_max: int) -> Descriptors:
    """Share the descriptors out between at most ``connections_max`` connections and all else: workers, logs,
    files.

    A quarter is kept for all else, half of that also while more connections come at once than are counted.
    """
    files_max = allow_many_files()
    kept = min(max(FILES_KEPT_MIN, min(files_max // 4, FILES_KEPT_MAX)), files_max // 2)
    fitting = min(connections_max, files_max - kept)
    return Descriptors(files_max, fitting, files_max - kept // 2, min(kept // 4, REFUSED_MAX))


def descriptors_for(connections_max: int | None) -> Descriptors:
    """Share the descriptors out for a front door.

    ``connections_max`` is how many are wanted, None for what there is room for. The log tells what came of
    it, and warns when there are fewer than were wanted.
    """
    room = share_descriptors(connections_max or CONNECTIONS_MAX)
    fitting, files_max = room.connections_max, room.files_max
    log_event(logger, Event.FILES_MAX, files_max=files_max, connections_max=fitting)
    if connections_max is not None and fitting < connections_max:
        detail = (
            f"{connections_max} connections do not fit into a limit of {files_max} open files: {fitting} do"
        )
        log_event(logger, Event.CONFIG_WARNING, detail=detail)
    return room


def settle_memory() -> None:
    """What was loaded stays: the collector need not walk tokenizers and tables again and again."""
    gc.collect()
    gc.freeze()

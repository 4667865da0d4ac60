"""How a process of kvrouter lives: until SIGTERM or SIGINT; a second one ends it at once."""

import asyncio
import gc
import resource
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)

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


def allow_many_files() -> None:
    """Let this process open as many files as the system allows it: a router has four for each worker.

    The limit that processes begin with, often 1,024, is for those that use ``select``.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # a system without a limit, or with one of its own below this
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def settle_memory() -> None:
    """What was loaded stays: the collector need not walk tokenizers and tables again and again."""
    gc.collect()
    gc.freeze()

"""How a process of kvrouter lives: until SIGTERM or SIGINT; a second one ends it at once."""

import asyncio
import gc
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


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

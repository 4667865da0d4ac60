"""How a process of kvrouter lives: until SIGTERM or SIGINT; a second one ends it at once."""

import asyncio
import gc
import signal
from collections.abc import Iterator
from contextlib import contextmanager

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


def settle_memory() -> None:
    """What was loaded stays: the collector need not walk tokenizers and tables again and again."""
    gc.collect()
    gc.freeze()

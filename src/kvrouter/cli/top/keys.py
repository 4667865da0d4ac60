"""Keys that are pressed at a terminal, read without waiting for the end of a line."""

import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

READ_BYTES = 64
SIGNALLED = 128
"""A process that a signal ended has this and the signal's number for an exit code."""


class Keys:
    """The keys of standard input; none where that is no terminal."""

    def __init__(self, *, is_terminal: bool) -> None:
        self.is_terminal = is_terminal

    def is_pressed(self, key: str, *, within_s: float) -> bool:
        """Wait for a key until the time is over; the end of the input counts as any key."""
        if not self.is_terminal:
            time.sleep(within_s)
            return False
        until_s = time.monotonic() + within_s
        while (left_s := until_s - time.monotonic()) > 0:
            if select.select([sys.stdin], [], [], left_s)[0]:
                pressed = os.read(sys.stdin.fileno(), READ_BYTES)
                if not pressed or key.encode() in pressed.lower():
                    return True
        return False


@contextmanager
def terminal_keys() -> Iterator[Keys]:
    """Have the terminal hand over each key at once, without showing it; it is as before at every end, also by
    SIGTERM.
    """
    if not sys.stdin.isatty():
        yield Keys(is_terminal=False)
        return
    before = termios.tcgetattr(sys.stdin)
    handler = signal.signal(signal.SIGTERM, _exit)
    try:
        tty.setcbreak(sys.stdin)
        yield Keys(is_terminal=True)
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSAFLUSH, before)
        signal.signal(signal.SIGTERM, handler)


def _exit(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(SIGNALLED + number)

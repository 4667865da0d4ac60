"""The writer of log lines: a thread writes them in batches, so that nobody else waits for their reader."""

import os
import select
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TextIO

BATCH_S = 0.05
"""How long a line may wait for others, in seconds."""

BATCH_CHARS = 1 << 16
"""So many characters are written without waiting for more."""

WAITING_CHARS_MAX = 1 << 20
"""Characters of lines that may wait; further lines are lost, and counted."""

URGENT_CHARS_MAX = 2 * WAITING_CHARS_MAX
"""The same for urgent lines: those of a stalled reader's first minutes leave room for later warnings."""

FLUSH_LIMIT_S = 1.0
"""How long an ending process waits for a stalled reader, in seconds."""


class LogWriter:
    """Writes lines to a stream in the order in which they came, each at most :data:`BATCH_S` later.

    A line that would exceed the bounds is lost, and counts in ``lines_lost``; ``lost_line`` makes the line
    that says how many were, which is written after those that waited. :meth:`write` may be called in every
    thread, and in a destructor.
    """

    def __init__(self, stream: TextIO, lost_line: Callable[[int], str]) -> None:
        self._write = _writing_to(stream)
        self._lost_line = lost_line
        self._lock = threading.RLock()  # a garbage collection under the lock may log
        self._lines: list[str] = []
        self._chars = 0
        self.lines_lost = 0
        self._said = 0
        self._wakes: SimpleQueue[threading.Event | None] = SimpleQueue()
        """None where lines wait, for others too; an event, set once they are written, where they must not."""
        self._at_once = threading.Event()
        self._is_closed = False
        self._is_forked = False
        os.register_at_fork(after_in_child=self._forked)
        threading.Thread(target=self._run, name="kvrouter-log", daemon=True).start()

    def write(self, line: str, *, is_urgent: bool) -> None:
        """Write a line soon, or at once where it is urgent; never waits for the stream's reader."""
        with self._lock:
            before = self._chars
            if before >= (URGENT_CHARS_MAX if is_urgent else WAITING_CHARS_MAX):
                self.lines_lost += 1
                return
            self._lines.append(line)
            self._chars = before + len(line)
        if self._is_forked:
            self._write_lines()
        elif is_urgent or before < BATCH_CHARS <= before + len(line):
            self._wakes.put(self._at_once)
        elif not before:
            self._wakes.put(None)

    def flush(self) -> None:
        """Wait until all lines are written, for at most :data:`FLUSH_LIMIT_S`."""
        if not self._is_forked and not self._is_closed:
            written = threading.Event()
            self._wakes.put(written)
            written.wait(FLUSH_LIMIT_S)

    def close(self) -> None:
        """Write all lines, and end the thread."""
        self.flush()
        self._is_closed = True
        self._wakes.put(self._at_once)

    def _run(self) -> None:
        while True:
            wake = self._wakes.get()
            if wake is None:
                with suppress(Empty):
                    wake = self._wakes.get(timeout=BATCH_S)
            self._write_lines()
            if wake is not None:
                wake.set()
            if self._is_closed:
                return

    def _write_lines(self) -> None:
        with self._lock:
            lines, lost = self._lines, self.lines_lost - self._said
            self._lines, self._chars, self._said = [], 0, self.lines_lost
        if not lines and not lost:
            return
        text = "".join(lines)
        try:
            self._write(text + self._lost_line(lost) if lost else text)
        except (OSError, ValueError):  # the disk is full, the reader is gone, or the stream is closed
            with self._lock:
                self._said -= lost
                self.lines_lost += len(lines)

    def _forked(self) -> None:
        """In a forked process: leave the parent's lines to the parent, and write each line at once, since the
        thread is the parent's.
        """
        self._lock = threading.RLock()
        self._lines, self._chars, self._said = [], 0, self.lines_lost
        self._is_forked = True


def _writing_to(stream: TextIO) -> Callable[[str], None]:
    """Return what writes a text to a stream: to its descriptor where it has one, past locks and buffers that
    others would wait for.
    """
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):

        def write_stream(text: str) -> None:
            stream.write(text)
            stream.flush()

        return write_stream

    def write(text: str) -> None:
        left = memoryview(text.encode(errors="backslashreplace"))
        while left:
            try:
                left = left[os.write(descriptor, left) :]
            except BlockingIOError:  # another process made the common descriptor non-blocking
                ready = select.poll()
                ready.register(descriptor, select.POLLOUT)
                ready.poll()

    return write

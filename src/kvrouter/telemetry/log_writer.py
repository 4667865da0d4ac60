"""The writer of log lines: a thread writes them in batches, so that nobody else waits for their reader."""

import os
import select
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TextIO
from weakref import WeakSet

BATCH_S = 0.2
"""How long a line may wait for others, in seconds: waking the thread is much of what a single line costs."""

BATCH_CHARS = 1 << 16
"""So many characters are written without waiting for more."""

WAITING_CHARS_MAX = 1 << 20
"""Characters of lines that may wait; further lines are lost, and counted."""

URGENT_CHARS_MAX = 2 * WAITING_CHARS_MAX
"""The same for urgent lines: those of a stalled reader's first minutes leave room for later warnings."""

STALL_LIMIT_S = 1.0
"""How long an ending process waits for a reader that reads nothing, in seconds."""

FLUSH_LIMIT_S = 10.0
"""How long it waits for one that reads slowly."""

PIECE_BYTES = select.PIPE_BUF - 1
"""So much is written at once, which no other process's lines get into, with a newline after a cut line."""


class LogWriter:
    """Writes lines to a stream in the order in which they came: the first after a pause at once, and then,
    while lines come, those of each :data:`BATCH_S` together.

    A line that would exceed the bounds is lost, and counts in ``lines_lost``; ``lost_line`` makes the line
    that says how many were, which is written after those that waited. :meth:`write` may be called in every
    thread, and in a destructor.
    """

    def __init__(self, stream: TextIO, lost_line: Callable[[int], str]) -> None:
        self._write = _writing_to(stream)
        self._written_bytes = 0
        self._is_cut = False
        """Whether half of a line was written last."""
        self._lost_line = lost_line
        self._lock = threading.RLock()  # a garbage collection under the lock may log
        self._lines: list[str] = []
        self._chars = 0
        self.lines_lost = 0
        self._said = 0
        self._wakes: SimpleQueue[threading.Event] = SimpleQueue()
        """What ends the thread's sleep: an event, set once the lines so far are written."""
        self._is_idle = True
        """Whether the thread sleeps until a line comes, since none came for :data:`BATCH_S`."""
        self._at_once = threading.Event()
        self._is_closed = False
        self._is_forked = False
        _WRITERS.add(self)
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
            was_idle, self._is_idle = self._is_idle, False
        if self._is_forked:
            self._write_lines()
        elif is_urgent or was_idle or before < BATCH_CHARS <= before + len(line):
            self._wakes.put(self._at_once)

    @property
    def is_half_full(self) -> bool:
        """Whether half of what may wait, or more, does."""
        return self._chars >= WAITING_CHARS_MAX // 2

    def flush(self) -> None:
        """Wait until all lines are written, while their reader reads, for at most :data:`FLUSH_LIMIT_S`."""
        if self._is_forked or self._is_closed:
            return
        written = threading.Event()
        self._wakes.put(written)
        for _ in range(int(FLUSH_LIMIT_S / STALL_LIMIT_S)):
            before = self._written_bytes
            if written.wait(STALL_LIMIT_S) or self._written_bytes == before:
                return

    def close(self) -> None:
        """Write all lines, and end the thread."""
        self.flush()
        self._is_closed = True
        self._wakes.put(self._at_once)

    def _run(self) -> None:
        while not self._is_closed:
            written = None
            with suppress(Empty):
                written = self._wakes.get(timeout=None if self._is_idle else BATCH_S)
            with self._lock:
                self._is_idle = not self._lines
            self._write_lines()
            if written is not None:
                written.set()

    def _write_lines(self) -> None:
        with self._lock:
            lines, lost = self._lines, self.lines_lost - self._said
            self._lines, self._chars, self._said = [], 0, self.lines_lost
        left = len(lines)
        try:
            if lost:
                lines.append(self._lost_line(lost))
            for piece in _pieces(lines):
                self._write_piece(b"".join(piece))
                left -= len(piece)
        except Exception:  # noqa: BLE001 - a full disk, a reader that is gone, no memory: later lines may do
            with self._lock:
                self._said -= lost
                self.lines_lost += left

    def _write_piece(self, piece: bytes) -> None:
        rest = memoryview(b"\n" + piece if self._is_cut else piece)
        while rest:
            n_bytes = self._write(rest)
            self._written_bytes += n_bytes
            self._is_cut = rest[n_bytes - 1] != ord("\n")
            rest = rest[n_bytes:]

    def forked(self) -> None:
        """In a forked process: leave the parent's lines to the parent, and write each line at once, since the
        thread is the parent's.
        """
        self._lock = threading.RLock()
        self._lines, self._chars, self._said = [], 0, self.lines_lost
        self._is_forked = True


_WRITERS = WeakSet[LogWriter]()


def _forked() -> None:
    for writer in _WRITERS:
        writer.forked()


os.register_at_fork(after_in_child=_forked)


def _pieces(lines: Sequence[str]) -> Iterator[list[bytes]]:
    """Yield the lines by as many as one write takes; one that is longer comes alone."""
    piece: list[bytes] = []
    n_bytes = 0
    for line in lines:
        encoded = line.encode(errors="backslashreplace")
        if piece and n_bytes + len(encoded) > PIECE_BYTES:
            yield piece
            piece, n_bytes = [], 0
        piece.append(encoded)
        n_bytes += len(encoded)
    if piece:
        yield piece


def _writing_to(stream: TextIO) -> Callable[[memoryview], int]:
    """Return what writes to a stream and returns how many bytes it wrote: to its descriptor where it has one,
    past locks and buffers that others would wait for.
    """
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):

        def write_stream(text: memoryview) -> int:
            stream.write(str(text, "utf-8"))
            stream.flush()
            return len(text)

        return write_stream

    def write(text: memoryview) -> int:
        while True:
            try:
                return os.write(descriptor, text)
            except BlockingIOError:  # another process made the common descriptor non-blocking
                ready = select.poll()
                ready.register(descriptor, select.POLLOUT)
                ready.poll()

    return write

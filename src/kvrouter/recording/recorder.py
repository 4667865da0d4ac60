"""Records traffic: the event loop adds records to a queue, and a thread compresses and writes them.

The thread polls the queue: a thread woken by each record would compete with the event loop for the GIL.
"""

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import partial

import msgspec
from msgspec.structs import replace

from kvrouter._native import RecordQueue
from kvrouter.core.hashing import Prompt
from kvrouter.recording.files import RecordingFolder, searched_member
from kvrouter.recording.request import RequestDetails, RequestFields
from kvrouter.recording.salt import Salt
from kvrouter.recording.schema import (
    Constraints,
    FleetChange,
    FleetRecord,
    Header,
    RefusalRecord,
    Worker,
)

QUEUE_BYTES_MAX = 1 << 24
"""Bytes in the queue: the text of records, and 8 bytes for each block of their prompts. The records being
written may hold as much again.
"""

TICK_S = 1.0
"""The longest time until the thread polls for a record. Each poll runs with cold caches and costs as much as
some ten records, so the thread polls once for many.
"""

BATCH_BYTES_MAX = 1 << 17
"""Bytes that are compressed and written at a time."""

CLOSE_LIMIT_S = 5.0
"""How long closing waits for the disk to take the last records."""


class Loss(StrEnum):
    """Why a record was not written."""

    QUEUE_FULL = "queue_full"
    """Too many records waited to be written."""
    ENDED = "ended"
    """The recording has ended."""
    ERROR = "error"
    """Encoding it failed, by a bug."""
    TOO_LONG = "too_long"
    """It is longer than ``total_bytes`` of all files."""


class Recorder:
    """Records into a folder until :meth:`close`. All methods are called on one thread, the event loop's.

    ``began_s`` is the start on the caller's clock, ``started_s`` the same moment in seconds of the Unix
    epoch. ``on_lost`` is called for each lost record while the recording runs, with the error where encoding
    failed: on the recorder's thread for TOO_LONG, else on the caller's. ``on_stopped`` is called once, on the
    recorder's thread, with the error that ended the recording.
    """

    def __init__(
        self,
        folder: RecordingFolder,
        salt: Salt,
        *,
        recording: str,
        version: str,
        began_s: float,
        started_s: float,
        on_lost: Callable[[Loss, Exception | None], None],
        on_stopped: Callable[[Exception], None],
    ) -> None:
        self.salt = salt
        self.lost: Counter[Loss] = Counter()
        """Records that were not written."""
        self.written = 0
        self.is_recording = True
        self.workers: Mapping[str, Worker] = {}
        """The fleet, by worker; replaced and never mutated, because the thread reads it too."""
        self._folder = folder
        self._began_s = began_s
        self._header = Header(
            version=version, recording=recording, part=0, started_s=round(started_s, 3), salt=salt.id
        )
        self._on_lost = on_lost
        self._on_stopped = on_stopped
        self._queue = RecordQueue(key=salt.block_key, began_s=began_s, bytes_max=QUEUE_BYTES_MAX)
        self._packed = bytearray()
        """The buffer for compressed lines; it grows to the longest."""
        self._unwritten = 0
        """Records taken from the queue that are neither written nor lost yet."""
        self._losing = threading.Lock()
        self._encode = msgspec.json.Encoder().encode
        self._known_of: Mapping[str, Worker] = self.workers
        self._known_taints: frozenset[str] = frozenset()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvrouter-recorder", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Write all queued records, within 5 s, and end the file. Blocks."""
        self._ending.set()
        self._thread.join(CLOSE_LIMIT_S)

    def since_start(self, at_s: float) -> float:
        """Return a time of the caller's clock as seconds from the start of the recording."""
        return microseconds(at_s - self._began_s)

    def note_request(self, prompt: Prompt, request: RequestFields, details: RequestDetails | None) -> None:
        """Record a request that has ended."""
        if not self.is_recording:
            self._count(Loss.ENDED)
            return
        try:
            more = b"" if details is None else b"," + self._encode(details)[1:-1]
            has_room = self._queue.add_request(prompt, request, more)
        except Exception as error:  # noqa: BLE001 - a bug in encoding loses this record only
            self._lose(Loss.ERROR, error)
        else:
            if not has_room:
                self._lose(Loss.QUEUE_FULL)

    def note_refusal(self, record: RefusalRecord) -> None:
        """Record a call that was refused before it became a request."""
        if not self.is_recording:
            self._count(Loss.ENDED)
            return
        try:
            line = self._encode(record) + b"\n"
        except Exception as error:  # noqa: BLE001 - a bug in encoding loses this record only
            self._lose(Loss.ERROR, error)
            return
        if not self._queue.add(line, record.at_s, QUEUE_BYTES_MAX):
            self._lose(Loss.QUEUE_FULL)

    def note_worker(self, change: FleetChange, worker: Worker, *, at_s: float) -> None:
        """Record a change of a worker; ``at_s`` counts from the start of the recording."""
        record = FleetRecord(at_s=at_s, change=change, workers=(worker,))
        try:
            line = self._encode(record) + b"\n"  # every file begun from here on lists this worker
        except Exception as error:  # noqa: BLE001 - a bug in encoding loses this record only
            self._lose(Loss.ERROR, error)
            return
        others = {name: known for name, known in self.workers.items() if name != worker.worker}
        self.workers = others if change is FleetChange.LEFT else others | {worker.worker: worker}
        if not self.is_recording:
            self._count(Loss.ENDED)
        elif not self._queue.add(line, at_s, 2 * QUEUE_BYTES_MAX):
            self._count(Loss.QUEUE_FULL)  # the next file begins with the whole fleet

    def salted(self, constraints: Constraints | None) -> Constraints | None:
        """Return constraints with salted names for taints that no worker carries: clients choose them."""
        if constraints is None:
            return None
        required, of_decode = constraints.required_taints, constraints.required_decode_taints
        preferred = constraints.preferred_taints
        if not (required or of_decode or preferred):
            return constraints
        workers = self.workers
        if workers is not self._known_of:
            self._known_of = workers
            self._known_taints = frozenset(taint for worker in workers.values() for taint in worker.taints)
        known, salted = self._known_taints, self.salt.taint

        def named(taint: str) -> str:
            return taint if taint in known else salted(taint)

        return replace(
            constraints,
            required_taints=tuple(map(named, required)),
            required_decode_taints=tuple(map(named, of_decode)),
            preferred_taints={named(taint): weight for taint, weight in preferred.items()},
        )

    def _lose(self, why: Loss, error: Exception | None = None) -> None:
        self._count(why)
        self._on_lost(why, error)

    def _count(self, why: Loss, n_records: int = 1) -> None:
        with self._losing:  # both threads count lost records
            self.lost[why] += n_records

    # On the thread

    def _run(self) -> None:
        try:
            while not self._ending.wait(TICK_S):
                self._write_all()
            self._write_all()
            self._folder.end()
        except Exception as error:  # noqa: BLE001 - any error ends the recording, and is reported
            self._on_stopped(error)
        finally:
            self.is_recording = False
            self._count(Loss.ENDED, self._unwritten + self._queue.take())
            self._folder.close()

    def _write_all(self) -> None:
        n_taken = self._unwritten = self._queue.take()
        first = 0
        while first < n_taken:
            first = self._write_batch(first)

    def _write_batch(self, first: int) -> int:
        """Write one batch of lines from ``first`` on; return where it ends."""
        end, room_bytes, at_s = self._queue.batch(first, BATCH_BYTES_MAX)
        if len(self._packed) < room_bytes:
            self._packed = bytearray(room_bytes)
        head = partial(self._head, at_s)
        if self._folder.add(self._member(first, end), head):
            self.written += end - first
            self._unwritten -= end - first
            return end
        for each in range(first, end):
            if self._folder.add(self._member(each, each + 1), head):
                self.written += 1
            else:
                self._lose(Loss.TOO_LONG)
            self._unwritten -= 1
        return end

    def _member(self, first: int, end: int) -> bytes | memoryview:
        """Return lines as a gzip member, in a buffer that the next call overwrites."""
        n_bytes, is_member = self._queue.pack(first, end, self._packed)
        packed = memoryview(self._packed)[:n_bytes]
        return packed if is_member else searched_member(packed)

    def _head(self, at_s: float, part: int) -> bytes:
        header = replace(self._header, part=part)
        fleet = FleetRecord(
            at_s=microseconds(at_s), change=FleetChange.ALL, workers=tuple(self.workers.values())
        )
        return self._encode(header) + b"\n" + self._encode(fleet) + b"\n"


def microseconds(seconds: float) -> float:
    """Return seconds to the microsecond, in half of the time that ``round(seconds, 6)`` takes."""
    return round(seconds * 1e6) / 1e6

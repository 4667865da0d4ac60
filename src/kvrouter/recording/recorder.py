"""Records traffic: what is noted on the event loop is salted, packed and written by a thread of its own.

Noting costs an append. The thread looks for records now and then, instead of being woken by each: a thread
that wants the interpreter holds the event loop up.
"""

import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import partial
from itertools import pairwise
from typing import Protocol

import msgspec
from msgspec.structs import replace

from kvrouter.recording.files import RecordingFolder
from kvrouter.recording.records import (
    Constraints,
    FleetChange,
    FleetRecord,
    Header,
    RefusalRecord,
    RequestRecord,
    Worker,
)
from kvrouter.recording.salt import Salt

QUEUE_RECORDS_MAX = 8_192
QUEUE_BLOCKS_MAX = 1 << 20
"""Records that wait to be written, and the blocks of their prompts, of 16 bytes each."""

TICK_S = 1.0
"""How long a record waits at most before the thread looks for it. What the thread runs is cold whenever it
looks, and costs as much as some ten records do: so it looks once for many.
"""

BATCH_RECORDS_MAX = 32
BATCH_BYTES_MAX = 1 << 17
"""What the thread makes before it writes: each write changes threads, and until then the event loop may wait
for the interpreter.
"""

PAUSE_BATCHES = 3
PAUSE_S = 0.001
"""After how many batches the thread leaves the interpreter to the event loop, and how long: a pause costs as
much as ten records do.
"""

CLOSE_LIMIT_S = 5.0
"""How long the end of this process waits for a disk that takes the last records."""


class HashedPrompt(Protocol):
    """What is recorded of a prompt."""

    @property
    def n_blocks(self) -> int:
        """The number of full blocks that have hashes."""

    @property
    def sequence_hashes(self) -> bytes:
        """Their sequence hashes: unsigned 64 bits each."""


class Loss(StrEnum):
    """Why a record was not written."""

    QUEUE_FULL = "queue_full"
    """Too many waited to be written."""
    ENDED = "ended"
    """The recording has ended."""
    ERROR = "error"
    """It could not be made: a mistake of ours."""
    TOO_LONG = "too_long"
    """It is longer than all files may be."""


MakeRequest = Callable[["Recorder", bytes], RequestRecord]
"""Makes the record of a request, with the names that the recorder has for a client's words; is given the
names of the prompt's blocks.
"""


class _Noted(msgspec.Struct, gc=False):
    """What waits to be written. Thousands may: the collector does not walk them."""

    what: MakeRequest | RefusalRecord | FleetRecord
    prompt: HashedPrompt | None = None
    n_blocks: int = 0


class Recorder:
    """Records into a folder until :meth:`close`. All methods are called on one thread, the event loop's.

    ``began_s`` is the start on the clock of the caller, ``started_s`` the same moment in seconds of the Unix
    epoch. ``on_lost`` is called for each record that is not written while others are, with the error where
    it could not be made: on that thread where the queue is full, else on the recorder's own. There
    ``on_stopped`` is called once, with the error after which nothing more is written.
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
        """The fleet, by worker; replaced and never changed, because the thread reads it too."""
        self._folder = folder
        self._began_s = began_s
        self._header = Header(
            version=version, recording=recording, part=0, started_s=round(started_s, 3), salt=salt.id
        )
        self._on_lost = on_lost
        self._on_stopped = on_stopped
        self._queue: deque[_Noted] = deque()
        self._blocks_noted = 0
        self._blocks_taken = 0
        self._unwritten = 0
        """Records that were taken, and neither are written nor lost."""
        self._losing = threading.Lock()
        encoder = msgspec.json.Encoder()
        self._encode = encoder.encode
        self._encode_into = encoder.encode_into
        self._known_of: Mapping[str, Worker] = self.workers
        self._known_taints: frozenset[str] = frozenset()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvrouter-recorder", daemon=True)

    def start(self) -> None:
        """Begin to write what is noted."""
        self._thread.start()

    def close(self) -> None:
        """Write what was noted, within 5 s, and end the file. Blocks."""
        self._ending.set()
        self._thread.join(CLOSE_LIMIT_S)

    def since_start(self, at_s: float) -> float:
        """Return a moment on the caller's clock as seconds from the start of the recording."""
        return microseconds(at_s - self._began_s)

    def note_request(self, make: MakeRequest, prompt: HashedPrompt) -> None:
        """Record a request, with the hashes of its prompt. ``make`` is called on the recorder's thread."""
        self._note(_Noted(make, prompt, prompt.n_blocks))

    def note_refusal(self, record: RefusalRecord) -> None:
        """Record a call that was refused before it was a request."""
        self._note(_Noted(record))

    def note_worker(self, change: FleetChange, worker: Worker, *, at_s: float) -> None:
        """Record what became of a worker; ``at_s`` counts from the start of the recording."""
        record = FleetRecord(at_s=at_s, change=change, workers=(worker,))
        try:
            self._encode(record)  # every file that is begun from here on lists this worker
        except Exception as error:  # noqa: BLE001 - a mistake of ours costs this record, and not the recording
            self._lose(Loss.ERROR, error)
            return
        others = {name: known for name, known in self.workers.items() if name != worker.worker}
        self.workers = others if change is FleetChange.LEFT else others | {worker.worker: worker}
        if not self.is_recording:
            self._count(Loss.ENDED)
        elif len(self._queue) >= 2 * QUEUE_RECORDS_MAX:
            self._count(Loss.QUEUE_FULL)  # the next file begins with the whole fleet
        else:
            self._queue.append(_Noted(record))

    def salted(self, constraints: Constraints | None) -> Constraints | None:
        """Return constraints without a client's own words: a taint that no worker carries has a salted name.
        Is called on the recorder's thread.
        """
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

    def _note(self, noted: _Noted) -> None:
        if not self.is_recording:
            self._count(Loss.ENDED)
        elif (
            len(self._queue) >= QUEUE_RECORDS_MAX
            or self._blocks_noted - self._blocks_taken + noted.n_blocks > QUEUE_BLOCKS_MAX
        ):
            self._lose(Loss.QUEUE_FULL)
        else:
            self._blocks_noted += noted.n_blocks
            self._queue.append(noted)

    def _lose(self, why: Loss, error: Exception | None = None) -> None:
        self._count(why)
        self._on_lost(why, error)

    def _count(self, why: Loss, n_records: int = 1) -> None:
        with self._losing:  # both threads lose records
            self.lost[why] += n_records

    # On the thread

    def _run(self) -> None:
        try:
            while not self._ending.wait(TICK_S):
                self._write_all()
            self._write_all()
            self._folder.end()
        except Exception as error:  # noqa: BLE001 - whatever ended the recording, it is said
            self._on_stopped(error)
        finally:
            self.is_recording = False
            self._count(Loss.ENDED, self._unwritten + len(self._queue))
            self._queue.clear()
            self._folder.close()

    def _write_all(self) -> None:
        while self._queue:
            for _ in range(PAUSE_BATCHES):
                self._write_batch()
            self._ending.wait(PAUSE_S)

    def _write_batch(self) -> None:
        lines = bytearray()
        ends: list[int] = []
        n_blocks = names_bytes = 0
        at_s = 0.0
        while self._queue and len(ends) < BATCH_RECORDS_MAX and len(lines) < BATCH_BYTES_MAX:
            noted = self._queue.popleft()
            n_blocks += noted.n_blocks
            try:
                names = b"" if noted.prompt is None else self.salt.blocks(noted.prompt.sequence_hashes)
                what = noted.what
                record = what if isinstance(what, RefusalRecord | FleetRecord) else what(self, names)
                self._encode_into(record, lines, -1)
            except Exception as error:  # noqa: BLE001 - a mistake of ours costs this record, and no other
                del lines[ends[-1] if ends else 0 :]
                self._lose(Loss.ERROR, error)
                continue
            lines += b"\n"
            at_s = record.at_s if not ends else at_s
            ends.append(len(lines))
            names_bytes += len(names)
        self._blocks_taken += n_blocks
        # names look random: packing them takes long, and saves a quarter at best
        searched = 2 * names_bytes < len(lines)
        add = partial(self._folder.add, head=partial(self._head, at_s), searched=searched)
        self._unwritten = len(ends)
        if not ends or add(lines):
            self.written += len(ends)
        else:
            for begin, end in pairwise([0, *ends]):
                if add(lines[begin:end]):
                    self.written += 1
                else:
                    self._lose(Loss.TOO_LONG)
                self._unwritten -= 1
        self._unwritten = 0

    def _head(self, at_s: float, part: int) -> bytes:
        header = replace(self._header, part=part)
        fleet = FleetRecord(at_s=at_s, change=FleetChange.ALL, workers=tuple(self.workers.values()))
        return self._encode(header) + b"\n" + self._encode(fleet) + b"\n"


def microseconds(seconds: float) -> float:
    """Return seconds to the microsecond, in half of the time that ``round(seconds, 6)`` takes."""
    return round(seconds * 1e6) / 1e6

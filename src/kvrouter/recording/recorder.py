"""Records traffic: what is noted on the event loop is salted, packed and written by a thread of its own.

Noting costs an append. The thread looks for records now and then, instead of being woken by each: a thread
that wants the interpreter holds the event loop up.
"""

import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

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

TICK_S = 0.25
"""How long a record waits at most before the thread looks for it."""

PAUSE_S = 0.001
"""How long the thread leaves the interpreter to the event loop after each batch."""

BATCH_RECORDS_MAX = 16
BATCH_BLOCKS_MAX = 8_192

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


_Record = RequestRecord | RefusalRecord | FleetRecord


class _Noted(NamedTuple):
    record: _Record | Callable[[], RequestRecord]
    prompt: HashedPrompt | None = None


class _Taken(NamedTuple):
    record: _Record
    prompt: HashedPrompt | None


class Recorder:
    """Records into a folder until :meth:`close`. All methods are called on one thread, the event loop's.

    ``began_s`` is the start on the clock of the caller, ``started_s`` the same moment in seconds of the Unix
    epoch. ``on_dropped`` is called on that thread for each record that finds the queue full; ``on_stopped``
    once, on the recorder's own, with the reason why nothing more is written.
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
        on_dropped: Callable[[], None],
        on_stopped: Callable[[str], None],
    ) -> None:
        self.salt = salt
        self.dropped = 0
        """Records that were not written: the queue was full, or the recording has stopped."""
        self.written = 0
        self.is_recording = True
        self.workers: Mapping[str, Worker] = {}
        """The fleet, by worker; replaced and never changed, because the thread reads it too."""
        self._folder = folder
        self._began_s = began_s
        self._header = Header(
            version=version, recording=recording, part=0, started_s=round(started_s, 3), salt=salt.id
        )
        self._on_dropped = on_dropped
        self._on_stopped = on_stopped
        self._queue: deque[_Noted] = deque()
        self._blocks_noted = 0
        self._blocks_taken = 0
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
        return round(at_s - self._began_s, 6)

    def note(
        self,
        record: RequestRecord | RefusalRecord | Callable[[], RequestRecord],
        prompt: HashedPrompt | None = None,
    ) -> None:
        """Record a request, with the hashes of its prompt, or a refusal. What makes a request's record is
        called on the recorder's thread.
        """
        n_blocks = 0 if prompt is None else prompt.n_blocks
        if not self.is_recording:
            self.dropped += 1
        elif (
            len(self._queue) >= QUEUE_RECORDS_MAX
            or self._blocks_noted - self._blocks_taken + n_blocks > QUEUE_BLOCKS_MAX
        ):
            self.dropped += 1
            self._on_dropped()
        else:
            self._blocks_noted += n_blocks
            self._queue.append(_Noted(record, prompt))

    def note_worker(self, change: FleetChange, worker: Worker, *, at_s: float) -> None:
        """Record what became of a worker; ``at_s`` counts from the start of the recording."""
        others = {name: known for name, known in self.workers.items() if name != worker.worker}
        self.workers = others if change is FleetChange.LEFT else others | {worker.worker: worker}
        if not self.is_recording or len(self._queue) >= 2 * QUEUE_RECORDS_MAX:
            self.dropped += 1  # the next file begins with the whole fleet
        else:
            self._queue.append(_Noted(FleetRecord(at_s=at_s, change=change, workers=(worker,))))

    # On the thread

    def _run(self) -> None:
        try:
            while not self._ending.wait(TICK_S):
                self._write_all()
            self._write_all()
            self._folder.end()
        except OSError as error:
            self._on_stopped(error.strerror or str(error))
        finally:
            self.is_recording = False
            self.dropped += len(self._queue)
            self._queue.clear()
            self._folder.close()

    def _write_all(self) -> None:
        while batch := self._take():
            lines, names_bytes = self._lines(batch)
            if not self._folder.is_open:
                lines[:0] = self._head(batch[0].record.at_s)
            # names look random: packing them takes long, and saves a quarter at best
            self._folder.add(lines, searched=2 * names_bytes < len(lines))
            self.written += len(batch)
            self._ending.wait(PAUSE_S)

    def _take(self) -> list[_Taken]:
        batch: list[_Taken] = []
        n_blocks = 0
        while self._queue and len(batch) < BATCH_RECORDS_MAX and n_blocks < BATCH_BLOCKS_MAX:
            record, prompt = self._queue.popleft()
            batch.append(_Taken(record if isinstance(record, _Record) else record(), prompt))
            n_blocks += 0 if prompt is None else prompt.n_blocks
        self._blocks_taken += n_blocks
        return batch

    def _head(self, at_s: float) -> bytes:
        header = replace(self._header, part=self._folder.begin())
        fleet = FleetRecord(at_s=at_s, change=FleetChange.ALL, workers=tuple(self.workers.values()))
        return self._encode(header) + b"\n" + self._encode(fleet) + b"\n"

    def _lines(self, batch: list[_Taken]) -> tuple[bytearray, int]:
        """Return the lines of records, and how many bytes of names of blocks are in them."""
        hashes = [b"" if noted.prompt is None else noted.prompt.sequence_hashes for noted in batch]
        names = self.salt.blocks(b"".join(hashes))
        lines = bytearray()
        begin = 0
        for noted, column in zip(batch, hashes, strict=True):
            record = noted.record
            if isinstance(record, RequestRecord):
                blocks = names[begin : begin + len(column)]
                record = replace(record, blocks=blocks, constraints=self._salted(record.constraints))
            begin += len(column)
            self._encode_into(record, lines, -1)
            lines += b"\n"
        return lines, len(names)

    def _salted(self, constraints: Constraints | None) -> Constraints | None:
        """What a client wrote is kept where a worker carries it: then its owner has chosen the word."""
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

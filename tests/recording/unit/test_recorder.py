"""The recorder: what is noted is written, and neither a full queue nor a full disk hurts who notes it."""

import base64
import errno
import gzip
import os
import shutil
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from kvrouter.core.events import pack_hashes, unpack_hashes
from kvrouter.core.hashing import Prompt
from kvrouter.recording.files import RecordingFolder, Write, recording_files
from kvrouter.recording.recorder import BATCH_BYTES_MAX, QUEUE_BYTES_MAX, Loss, Recorder
from kvrouter.recording.request import RequestDetails, RequestFields
from kvrouter.recording.salt import Salt
from kvrouter.recording.schema import Constraints, FleetChange, RefusalRecord, Status, Worker
from kvrouter.sim.traces.lines import read_lines
from tests.oracles.siphash import siphash

SALT = Salt(b"s" * 32)
SMALL = RefusalRecord(at_s=0.5, code="model_not_found", http_status=404, route="/v1/completions")
SMALL_BYTES = len(msgspec.json.encode(SMALL)) + 1
BATCH = BATCH_BYTES_MAX // SMALL_BYTES
"""How many of them are written at a time."""


class Bench:
    """A recorder, and what it said."""

    def __init__(
        self,
        folder: Path,
        *,
        write: Write = os.write,
        file_bytes: int = 1 << 20,
        total_bytes: int = 1 << 24,
    ) -> None:
        self.lost: list[tuple[Loss, Exception | None]] = []
        self.stopped: list[Exception] = []
        self.folder = folder
        files = RecordingFolder(
            folder,
            recording="0000000a",
            file_bytes=file_bytes,
            total_bytes=total_bytes,
            started_s=100.0,
            write=write,
        )
        self.recorder = Recorder(
            files,
            SALT,
            recording="0000000a",
            version="1",
            began_s=7.0,
            started_s=100.0,
            on_lost=lambda why, error: self.lost.append((why, error)),
            on_stopped=self.stopped.append,
        )

    def written(self) -> list[dict[str, Any]]:
        """Write all that was noted; return the lines."""
        self.recorder.start()
        self.recorder.close()
        packed = b"".join(gzip.decompress(path.read_bytes()) for path in recording_files(self.folder))
        return [msgspec.json.decode(line) for line in packed.splitlines()]


def request(model: str = "m", *, max_tokens: Any = 9) -> RequestFields:
    """One that was never placed."""
    return (model, None, False, max_tokens, 3, Status.FINISHED, None, 8.0, None, 8.25, ())


def blocks(n: int) -> Prompt:
    """A prompt of so many blocks."""
    return Prompt.from_blocks(bytes(8 * n), isl_tokens=n, block_size=1)


def worker(name: str, *taints: str) -> Worker:
    return Worker(worker=name, model="m", role="both", block_size=4, context_length=64, taints=taints)


def test_recording_has_salted_blocks_and_lists_the_fleet(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    prompts = [Prompt(range(n), block_size=4) for n in (0, 3, 9, 17)]
    bench.recorder.note_worker(FleetChange.JOINED, worker("1", "a/b"), at_s=0.5)
    for prompt in prompts:
        bench.recorder.note_request(prompt, request(), None)
    header, fleet, joined, *requests = bench.written()
    assert header == {
        "kind": "header",
        "schema": "kvrouter.recording.v1",
        "version": "1",
        "recording": "0000000a",
        "part": 1,
        "started_s": 100.0,
        "salt": SALT.id,
    }
    assert (fleet["change"], [each["worker"] for each in fleet["workers"]]) == ("all", ["1"])
    assert (joined["change"], joined["at_s"]) == ("joined", 0.5)
    for written, prompt in zip(requests, prompts, strict=True):
        names = [siphash(each, SALT.block_key) for each in unpack_hashes(prompt.sequence_hashes)]
        assert base64.b64decode(written["blocks"]) == pack_hashes(names)
        assert (written["kind"], written["input_tokens"]) == ("request", prompt.isl_tokens)
    assert (bench.recorder.written, bench.recorder.lost.total()) == (5, 0)
    assert bench.recorder.since_start(9.5) == 2.5


def test_each_file_begins_with_the_current_fleet(tmp_path: Path) -> None:
    bench = Bench(tmp_path, file_bytes=1)
    for name in ("1", "2"):
        bench.recorder.note_worker(FleetChange.JOINED, worker(name), at_s=0.5)
    for change in (FleetChange.SILENT, FleetChange.LEFT):
        bench.recorder.note_worker(change, worker("1"), at_s=0.5)
    for _ in range(BATCH):
        bench.recorder.note_refusal(SMALL)
    lines = bench.written()
    assert [line["part"] for line in lines if line["kind"] == "header"] == [1, 2]
    heads = [line for line in lines if line.get("change") == "all"]
    assert [[each["worker"] for each in head["workers"]] for head in heads] == [["2"], ["2"]]


def test_only_taints_that_no_worker_has_are_salted(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.recorder.note_worker(FleetChange.JOINED, worker("1", "pool/fast"), at_s=0.5)
    prompt = Prompt(range(4), block_size=4)
    asked = Constraints(
        required_taints=("pool/fast", "who/acme"), preferred_taints={"who/acme": 0.5}, pin="1"
    )
    details = RequestDetails(constraints=bench.recorder.salted(asked))
    bench.recorder.note_request(prompt, request(), details)
    constraints = bench.written()[-1]["constraints"]
    assert constraints == {
        "required_taints": ["pool/fast", SALT.taint("who/acme")],
        "preferred_taints": {SALT.taint("who/acme"): 0.5},
        "pin": "1",
    }


def test_full_queue_drops_new_records_and_keeps_queued_ones(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    n_noted = QUEUE_BYTES_MAX // SMALL_BYTES
    for _ in range(n_noted + 3):
        bench.recorder.note_refusal(SMALL)
    assert bench.recorder.lost == Counter({Loss.QUEUE_FULL: 3})
    assert bench.lost == [(Loss.QUEUE_FULL, None)] * 3
    bench.recorder.note_worker(FleetChange.JOINED, worker("1"), at_s=0.5)  # of these are few
    lines = bench.written()
    assert len([line for line in lines if line["kind"] == "refusal"]) == n_noted
    assert lines[-1]["change"] == "joined"
    assert bench.recorder.written == n_noted + 1


def test_blocks_count_toward_the_queue_limit_until_written(tmp_path: Path) -> None:
    is_written = threading.Event()

    def write(file: int, packed: bytes | memoryview) -> int:
        is_written.set()
        return os.write(file, packed)

    bench = Bench(tmp_path, write=write, total_bytes=1 << 26)
    for n_blocks in (QUEUE_BYTES_MAX // 8 + 1, QUEUE_BYTES_MAX // 8, 1):
        bench.recorder.note_request(blocks(n_blocks), request(), None)
    assert bench.recorder.lost == Counter({Loss.QUEUE_FULL: 2})
    bench.recorder.note_refusal(SMALL)
    assert bench.recorder.lost == Counter({Loss.QUEUE_FULL: 3})
    bench.recorder.start()
    assert is_written.wait(60.0)
    bench.recorder.note_request(blocks(1), request(), None)
    bench.recorder.close()
    assert (bench.recorder.written, bench.recorder.lost) == (2, Counter({Loss.QUEUE_FULL: 3}))


def test_record_that_cannot_be_encoded_is_lost_and_others_are_written(
    tmp_path: Path,
) -> None:
    bench = Bench(tmp_path)
    prompt = Prompt(range(8), block_size=4)
    half = RequestDetails(session="\ud800")
    wrong = [
        (request("\ud800"), None),
        (request(max_tokens=object()), None),
        (request(max_tokens=1 << 70), None),
        (request(), half),
    ]
    for fields, details in wrong:
        bench.recorder.note_request(prompt, request("before"), None)
        bench.recorder.note_request(prompt, fields, details)
    bench.recorder.note_worker(FleetChange.JOINED, worker("\ud800"), at_s=0.5)
    bench.recorder.note_refusal(replace(SMALL, model="\ud800"))
    bench.recorder.note_worker(FleetChange.JOINED, worker("1"), at_s=0.5)
    lines = bench.written()
    assert [line["model"] for line in lines if line["kind"] == "request"] == ["before"] * len(wrong)
    fleets = [line for line in lines if line["kind"] == "fleet"]
    assert [[each["worker"] for each in fleet["workers"]] for fleet in fleets] == [["1"], ["1"]]
    assert bench.recorder.lost == Counter({Loss.ERROR: 6})
    assert {why for why, _ in bench.lost} == {Loss.ERROR}
    kinds = {type(error) for _, error in bench.lost}
    assert kinds == {OverflowError, UnicodeEncodeError, TypeError}
    assert (bench.recorder.written, bench.stopped) == (len(wrong) + 1, [])


def test_recording_keeps_its_total_limit_and_drops_too_long_records(
    tmp_path: Path,
) -> None:
    held: list[int] = []

    def write(file: int, packed: bytes | memoryview) -> int:
        n_bytes = os.write(file, packed)
        held.append(sum(path.stat().st_size for path in recording_files(tmp_path)))
        return n_bytes

    bench = Bench(tmp_path, write=write, file_bytes=32 << 10, total_bytes=64 << 10)
    for n_blocks in (2_500, 2_500, 2_500, 2_500, 8_000, 2_500, 2_500, 8_000):
        bench.recorder.note_request(blocks(n_blocks), request(), None)
    names = [each for each in bench.written() if each["kind"] == "request"]
    assert [len(base64.b64decode(each["blocks"])) for each in names] == [8 * 2_500] * 2
    assert (bench.recorder.written, bench.recorder.lost) == (6, Counter({Loss.TOO_LONG: 2}))
    assert bench.lost == [(Loss.TOO_LONG, None)] * 2
    assert max(held) <= 64 << 10
    assert len(held) == 6


def test_record_longer_than_a_batch_is_written_whole(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    sizes = [3, 2 * BATCH_BYTES_MAX // 8, 0, 5 * BATCH_BYTES_MAX // 8, 1]
    for n_blocks in sizes:
        bench.recorder.note_request(blocks(n_blocks), request(), None)
    names = [base64.b64decode(each["blocks"]) for each in bench.written() if each["kind"] == "request"]
    assert [len(each) // 8 for each in names] == sizes
    last = unpack_hashes(blocks(max(sizes)).sequence_hashes)[-1]
    assert names[3][-8:] == pack_hashes([siphash(last, SALT.block_key)])
    assert bench.recorder.lost.total() == 0


def failing(after: int) -> Write:
    """A disk that takes so many writes, half of the next one, and no more."""
    n = 0

    def write(file: int, packed: bytes | memoryview) -> int:
        nonlocal n
        n += 1
        if n == after + 1:
            return os.write(file, packed[: len(packed) // 2])
        if n > after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.write(file, packed)

    return write


def test_full_disk_ends_the_recording_and_counts_lost_records(tmp_path: Path) -> None:
    bench = Bench(tmp_path, write=failing(1))
    n_noted = 3 * BATCH
    for _ in range(n_noted):
        bench.recorder.note_refusal(SMALL)
    bench.recorder.start()
    bench.recorder.close()
    (error,) = bench.stopped
    assert isinstance(error, OSError)
    assert error.errno == errno.ENOSPC
    assert not bench.recorder.is_recording
    written = BATCH
    assert (bench.recorder.written, bench.recorder.lost) == (
        written,
        Counter({Loss.ENDED: n_noted - written}),
    )
    bench.recorder.note_refusal(SMALL)
    bench.recorder.note_worker(FleetChange.JOINED, worker("1"), at_s=1.0)
    assert bench.recorder.lost == Counter({Loss.ENDED: n_noted - written + 2})
    assert bench.lost == []
    (path,) = recording_files(tmp_path)
    said: list[str] = []
    records = [msgspec.json.decode(text) for _, text in read_lines(path, said.append)]
    assert [record["kind"] for record in records[: written + 2]] == [
        "header",
        "fleet",
        *["refusal"] * written,
    ]
    assert written + 2 < len(records) < 2 * written + 2  # of what was half written, whole lines are read
    assert said == [f"{path}: is cut short after line {len(records)}"]
    RecordingFolder(
        tmp_path, recording="0000000b", file_bytes=1, total_bytes=2, started_s=1.0
    ).close()  # it has let go of the folder


def test_exception_while_writing_ends_the_recording_and_is_reported(tmp_path: Path) -> None:
    def write(_file: int, _packed: bytes | memoryview) -> int:
        raise ValueError("a mistake")

    bench = Bench(tmp_path, write=write)
    bench.recorder.note_refusal(SMALL)
    bench.recorder.start()
    bench.recorder.close()
    assert [repr(error) for error in bench.stopped] == ["ValueError('a mistake')"]
    assert (bench.recorder.is_recording, bench.recorder.lost) == (False, Counter({Loss.ENDED: 1}))


def test_removed_folder_ends_the_recording_at_the_next_write(tmp_path: Path) -> None:
    def write(file: int, packed: bytes | memoryview) -> int:
        n_bytes = os.write(file, packed)
        shutil.rmtree(tmp_path / "a")
        return n_bytes

    bench = Bench(tmp_path / "a", write=write)
    for _ in range(BATCH + 1):
        bench.recorder.note_refusal(SMALL)
    bench.recorder.start()
    bench.recorder.close()
    (error,) = bench.stopped
    assert isinstance(error, FileNotFoundError)
    assert bench.recorder.written == BATCH
    assert bench.recorder.lost == Counter({Loss.ENDED: 1})

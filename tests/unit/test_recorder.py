"""The recorder: what is noted is written, and neither a full queue nor a full disk hurts who notes it."""

import base64
import errno
import gzip
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from kvrouter.core.hashing import Prompt
from kvrouter.recording import recorder as module
from kvrouter.recording.files import RecordingFolder, Write, recording_files
from kvrouter.recording.recorder import QUEUE_BLOCKS_MAX, QUEUE_RECORDS_MAX, Recorder
from kvrouter.recording.records import (
    Constraints,
    FleetChange,
    RefusalRecord,
    RequestRecord,
    Status,
    Worker,
)
from kvrouter.recording.salt import Salt

SALT = Salt(b"s" * 32)
SMALL = RefusalRecord(at_s=0.5, code="model_not_found", http_status=404, route="/v1/completions")


class Bench:
    """A recorder, and what it said."""

    def __init__(self, folder: Path, *, write: Write = os.write, file_bytes: int = 1 << 20) -> None:
        self.n_full = 0
        self.stopped: list[str] = []
        self.folder = folder
        files = RecordingFolder(
            folder,
            recording="0000000a",
            file_bytes=file_bytes,
            total_bytes=1 << 24,
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
            on_dropped=self.full,
            on_stopped=self.stopped.append,
        )

    def full(self) -> None:
        self.n_full += 1

    def written(self) -> list[dict[str, Any]]:
        """Write all that was noted; return the lines."""
        self.recorder.start()
        self.recorder.close()
        packed = b"".join(gzip.decompress(path.read_bytes()) for path in recording_files(self.folder))
        return [msgspec.json.decode(line) for line in packed.splitlines()]


def request(prompt: Prompt, **more: Any) -> RequestRecord:
    fields: dict[str, Any] = {
        "at_s": 1.0,
        "model": "m",
        "input_tokens": prompt.isl_tokens,
        "output_tokens": 3,
        "max_tokens": 9,
        "block_size": prompt.block_size,
        "blocks": b"",
        "status": Status.FINISHED,
        "ended_s": 0.25,
    }
    return RequestRecord(**fields | more)


def worker(name: str, *taints: str) -> Worker:
    return Worker(worker=name, model="m", role="both", block_size=4, context_length=64, taints=taints)


class Blocks:
    """A prompt of a number of blocks, whose hashes nobody asks for."""

    sequence_hashes = b""

    def __init__(self, n_blocks: int) -> None:
        self.n_blocks = n_blocks


def test_blocks_are_written_under_salted_names_and_the_file_says_who_is_there(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    prompts = [Prompt(range(n), block_size=4) for n in (0, 3, 9, 17)]
    bench.recorder.note_worker(FleetChange.JOINED, worker("1", "a/b"), at_s=0.5)
    for prompt in prompts:
        bench.recorder.note(request(prompt), prompt)
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
        assert base64.b64decode(written["blocks"]) == SALT.blocks(prompt.sequence_hashes)
        assert (written["kind"], written["input_tokens"]) == ("request", prompt.isl_tokens)
    assert (bench.recorder.written, bench.recorder.dropped) == (5, 0)
    assert bench.recorder.since_start(9.5) == 2.5


def test_each_file_begins_with_the_fleet_as_it_is_then(tmp_path: Path) -> None:
    bench = Bench(tmp_path, file_bytes=1)
    for name in ("1", "2"):
        bench.recorder.note_worker(FleetChange.JOINED, worker(name), at_s=0.5)
    for change in (FleetChange.SILENT, FleetChange.LEFT):
        bench.recorder.note_worker(change, worker("1"), at_s=0.5)
    for _ in range(module.BATCH_RECORDS_MAX):
        bench.recorder.note(SMALL)
    lines = bench.written()
    assert [line["part"] for line in lines if line["kind"] == "header"] == [1, 2]
    heads = [line for line in lines if line.get("change") == "all"]
    assert [[each["worker"] for each in head["workers"]] for head in heads] == [["2"], ["2"]]


def test_a_client_s_words_are_salted_and_a_worker_s_are_not(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.recorder.note_worker(FleetChange.JOINED, worker("1", "pool/fast"), at_s=0.5)
    prompt = Prompt(range(4), block_size=4)
    asked = Constraints(
        required_taints=("pool/fast", "who/acme"), preferred_taints={"who/acme": 0.5}, pin="1"
    )
    bench.recorder.note(request(prompt, constraints=asked), prompt)
    constraints = bench.written()[-1]["constraints"]
    assert constraints == {
        "required_taints": ["pool/fast", SALT.taint("who/acme")],
        "preferred_taints": {SALT.taint("who/acme"): 0.5},
        "pin": "1",
    }


def test_a_full_queue_drops_what_comes_and_keeps_what_waits(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    for _ in range(QUEUE_RECORDS_MAX + 3):
        bench.recorder.note(SMALL)
    assert (bench.recorder.dropped, bench.n_full) == (3, 3)
    lines = bench.written()
    assert len([line for line in lines if line["kind"] == "refusal"]) == QUEUE_RECORDS_MAX
    assert bench.recorder.written == QUEUE_RECORDS_MAX


def test_the_queue_is_full_of_blocks_too(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    prompt = Prompt(range(4), block_size=4)
    for n_blocks in (QUEUE_BLOCKS_MAX, 1, 0):
        bench.recorder.note(request(prompt), Blocks(n_blocks))
    assert (bench.recorder.dropped, bench.n_full) == (1, 1)


def failing(after: int) -> Callable[[int, bytes], int]:
    """A disk that is full after so many writes."""
    n = 0

    def write(file: int, packed: bytes) -> int:
        nonlocal n
        n += 1
        if n > after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.write(file, packed)

    return write


def test_a_full_disk_ends_the_recording_and_nothing_else(tmp_path: Path) -> None:
    bench = Bench(tmp_path, write=failing(1))
    for _ in range(3 * module.BATCH_RECORDS_MAX):
        bench.recorder.note(SMALL)
    bench.recorder.start()
    bench.recorder.close()
    assert bench.stopped == ["No space left on device"]
    assert not bench.recorder.is_recording
    dropped = bench.recorder.dropped
    assert dropped >= module.BATCH_RECORDS_MAX
    bench.recorder.note(SMALL)
    bench.recorder.note_worker(FleetChange.JOINED, worker("1"), at_s=1.0)
    assert bench.recorder.dropped == dropped + 2
    assert bench.n_full == 0
    RecordingFolder(
        tmp_path, recording="0000000b", file_bytes=1, total_bytes=2, started_s=1.0
    ).close()  # it has let go of the folder

"""The recorder: what is noted is written, and neither a full queue nor a full disk hurts who notes it."""

import base64
import errno
import gzip
import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from kvrouter.core.hashing import Prompt
from kvrouter.recording import recorder as module
from kvrouter.recording.files import RecordingFolder, Write, recording_files
from kvrouter.recording.recorder import QUEUE_BLOCKS_MAX, QUEUE_RECORDS_MAX, Loss, MakeRequest, Recorder
from kvrouter.recording.records import (
    Constraints,
    FleetChange,
    RefusalRecord,
    RequestRecord,
    Status,
    Worker,
)
from kvrouter.recording.salt import Salt
from kvrouter.sim.traces.lines import read_lines

SALT = Salt(b"s" * 32)
SMALL = RefusalRecord(at_s=0.5, code="model_not_found", http_status=404, route="/v1/completions")


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


def request(prompt: Prompt, **more: Any) -> MakeRequest:
    fields: dict[str, Any] = {
        "at_s": 1.0,
        "model": "m",
        "input_tokens": prompt.isl_tokens,
        "output_tokens": 3,
        "max_tokens": 9,
        "block_size": prompt.block_size,
        "status": Status.FINISHED,
        "ended_s": 0.25,
    }
    return lambda _recorder, blocks: RequestRecord(**fields | more, blocks=blocks)


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
        bench.recorder.note_request(request(prompt), prompt)
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
    assert (bench.recorder.written, bench.recorder.lost.total()) == (5, 0)
    assert bench.recorder.since_start(9.5) == 2.5


def test_each_file_begins_with_the_fleet_as_it_is_then(tmp_path: Path) -> None:
    bench = Bench(tmp_path, file_bytes=1)
    for name in ("1", "2"):
        bench.recorder.note_worker(FleetChange.JOINED, worker(name), at_s=0.5)
    for change in (FleetChange.SILENT, FleetChange.LEFT):
        bench.recorder.note_worker(change, worker("1"), at_s=0.5)
    for _ in range(module.BATCH_RECORDS_MAX):
        bench.recorder.note_refusal(SMALL)
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
    salted = bench.recorder.salted
    bench.recorder.note_request(request(prompt, constraints=salted(asked)), prompt)
    constraints = bench.written()[-1]["constraints"]
    assert constraints == {
        "required_taints": ["pool/fast", SALT.taint("who/acme")],
        "preferred_taints": {SALT.taint("who/acme"): 0.5},
        "pin": "1",
    }


def test_a_full_queue_drops_what_comes_and_keeps_what_waits(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    for _ in range(QUEUE_RECORDS_MAX + 3):
        bench.recorder.note_refusal(SMALL)
    assert bench.recorder.lost == Counter({Loss.QUEUE_FULL: 3})
    assert bench.lost == [(Loss.QUEUE_FULL, None)] * 3
    lines = bench.written()
    assert len([line for line in lines if line["kind"] == "refusal"]) == QUEUE_RECORDS_MAX
    assert bench.recorder.written == QUEUE_RECORDS_MAX


def test_the_queue_is_full_of_blocks_too(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    prompt = Prompt(range(4), block_size=4)
    for n_blocks in (QUEUE_BLOCKS_MAX, 1, 0):
        bench.recorder.note_request(request(prompt), Blocks(n_blocks))
    assert bench.recorder.lost == Counter({Loss.QUEUE_FULL: 1})


def test_a_record_that_cannot_be_made_or_encoded_is_lost_and_those_around_it_are_written(
    tmp_path: Path,
) -> None:
    bench = Bench(tmp_path)
    prompt = Prompt(range(8), block_size=4)

    def mistaken(_recorder: Recorder, _names: bytes) -> RequestRecord:
        raise KeyError("no such worker")

    wrong = (mistaken, request(prompt, model="\ud800"), request(prompt, max_tokens=object()))
    for make in wrong:
        bench.recorder.note_request(request(prompt, model="before"), prompt)
        bench.recorder.note_request(make, prompt)
    bench.recorder.note_worker(FleetChange.JOINED, worker("\ud800"), at_s=0.5)
    bench.recorder.note_worker(FleetChange.JOINED, worker("1"), at_s=0.5)
    lines = bench.written()
    assert [line["model"] for line in lines if line["kind"] == "request"] == ["before"] * 3
    fleets = [line for line in lines if line["kind"] == "fleet"]
    assert [[each["worker"] for each in fleet["workers"]] for fleet in fleets] == [["1"], ["1"]]
    assert bench.recorder.lost == Counter({Loss.ERROR: 4})
    assert {why for why, _ in bench.lost} == {Loss.ERROR}
    kinds = {type(error) for _, error in bench.lost}
    assert kinds == {KeyError, UnicodeEncodeError, TypeError}
    assert (bench.recorder.written, bench.stopped) == (4, [])


def test_blocks_of_a_record_that_was_lost_no_longer_fill_the_queue(tmp_path: Path) -> None:
    is_written = threading.Event()

    def write(file: int, packed: bytes) -> int:
        is_written.set()
        return os.write(file, packed)

    def mistaken(_recorder: Recorder, _names: bytes) -> RequestRecord:
        raise KeyError("no such worker")

    bench = Bench(tmp_path, write=write)
    prompt = Prompt(range(8), block_size=4)
    bench.recorder.note_request(mistaken, Blocks(QUEUE_BLOCKS_MAX))
    bench.recorder.note_request(request(prompt), prompt)
    assert bench.recorder.lost == Counter({Loss.QUEUE_FULL: 1})
    bench.recorder.note_refusal(SMALL)
    bench.recorder.start()
    assert is_written.wait(60.0)
    bench.recorder.note_request(request(prompt), prompt)
    bench.recorder.close()
    assert bench.recorder.written == 2
    assert bench.recorder.lost == Counter({Loss.QUEUE_FULL: 1, Loss.ERROR: 1})


def test_no_file_and_not_all_of_them_hold_more_than_they_may_whatever_the_length_of_a_record(
    tmp_path: Path,
) -> None:
    held: list[int] = []

    def write(file: int, packed: bytes) -> int:
        n_bytes = os.write(file, packed)
        held.append(sum(path.stat().st_size for path in recording_files(tmp_path)))
        return n_bytes

    bench = Bench(tmp_path, write=write, file_bytes=64 << 10, total_bytes=128 << 10)
    fits, too_long = (Prompt(range(n), block_size=4) for n in (4 * 6_000, 4 * 16_000))
    for at in range(9):
        prompt = too_long if at % 3 == 2 else fits
        bench.recorder.note_request(request(prompt), prompt)
    names = [each for each in bench.written() if each["kind"] == "request"]
    assert [len(base64.b64decode(each["blocks"])) for each in names] == [8 * 6_000] * 2
    assert (bench.recorder.written, bench.recorder.lost) == (6, Counter({Loss.TOO_LONG: 3}))
    assert bench.lost == [(Loss.TOO_LONG, None)] * 3
    assert max(held) <= 128 << 10
    assert len(held) == 6


def failing(after: int) -> Callable[[int, bytes], int]:
    """A disk that takes so many writes, half of the next one, and no more."""
    n = 0

    def write(file: int, packed: bytes) -> int:
        nonlocal n
        n += 1
        if n == after + 1:
            return os.write(file, packed[: len(packed) // 2])
        if n > after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.write(file, packed)

    return write


def test_a_full_disk_ends_the_recording_and_nothing_else(tmp_path: Path) -> None:
    bench = Bench(tmp_path, write=failing(1))
    n_noted = 3 * module.BATCH_RECORDS_MAX
    for _ in range(n_noted):
        bench.recorder.note_refusal(SMALL)
    bench.recorder.start()
    bench.recorder.close()
    (error,) = bench.stopped
    assert isinstance(error, OSError)
    assert error.errno == errno.ENOSPC
    assert not bench.recorder.is_recording
    written = module.BATCH_RECORDS_MAX
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
    assert [record["kind"] for record in records] == ["header", "fleet", *["refusal"] * written]
    assert said == [f"{path}: is cut short after line {written + 2}"]
    RecordingFolder(
        tmp_path, recording="0000000b", file_bytes=1, total_bytes=2, started_s=1.0
    ).close()  # it has let go of the folder


def test_a_mistake_while_a_file_is_written_ends_the_recording_and_is_said(tmp_path: Path) -> None:
    def write(_file: int, _packed: bytes) -> int:
        raise ValueError("a mistake")

    bench = Bench(tmp_path, write=write)
    bench.recorder.note_refusal(SMALL)
    bench.recorder.start()
    bench.recorder.close()
    assert [repr(error) for error in bench.stopped] == ["ValueError('a mistake')"]
    assert (bench.recorder.is_recording, bench.recorder.lost) == (False, Counter({Loss.ENDED: 1}))


def test_a_folder_that_is_removed_ends_the_recording_at_its_next_records(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "a")

    def removing(recorder: Recorder, _names: bytes) -> RequestRecord:
        shutil.rmtree(tmp_path / "a")
        return request(Prompt((), block_size=4))(recorder, b"")

    prompt = Prompt((), block_size=4)
    for _ in range(module.BATCH_RECORDS_MAX):
        bench.recorder.note_refusal(SMALL)
    bench.recorder.note_request(removing, prompt)
    bench.recorder.start()
    bench.recorder.close()
    (error,) = bench.stopped
    assert isinstance(error, FileNotFoundError)
    assert bench.recorder.written == module.BATCH_RECORDS_MAX
    assert bench.recorder.lost == Counter({Loss.ENDED: 1})

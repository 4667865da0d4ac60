"""Lines of a log are written by a thread: whole, in order, within bounds, and never by who logs them."""

import fcntl
import io
import os
import re
import resource
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvrouter.telemetry import log_writer
from kvrouter.telemetry.log_writer import URGENT_CHARS_MAX, WAITING_CHARS_MAX, LogWriter
from tests.testing.constants import SetConstants

LOST = re.compile(r"lost (\d+)")


def lost_line(lines: int) -> str:
    return f"lost {lines}\n"


class Pipe:
    """A pipe of 4 KiB, and the writer of its lines."""

    def __init__(self) -> None:
        self._read_end, write_end = os.pipe()
        fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, 4096)
        self.stream = os.fdopen(write_end, "w")
        self.writer = LogWriter(self.stream, lost_line)

    def read(self) -> str:
        """All that is written until the writer has nothing more to write."""
        with ThreadPoolExecutor() as threads:
            reading = threads.submit(lambda: b"".join(iter(lambda: os.read(self._read_end, 65_536), b"")))
            self.writer.close()
            self.stream.close()
        return reading.result().decode()

    def has_line(self, *, within_s: float) -> bool:
        """Whether something is there to read, or comes in time."""
        return bool(select.select([self._read_end], [], [], within_s)[0])

    def read_line(self) -> str:
        """The next bytes, once they are there."""
        assert self.has_line(within_s=60.0), "nothing comes"
        return os.read(self._read_end, 4096).decode()

    def end(self) -> None:
        """Close both ends."""
        os.close(self._read_end)
        self.stream.close()


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe()
    yield made
    made.end()


def test_each_line_is_written_without_a_flush(pipe: Pipe) -> None:
    for line in ["first\n", "second\n", "third\n"]:
        pipe.writer.write(line, is_urgent=False)
        assert pipe.read_line() == line


def test_first_line_is_written_at_once_and_those_after_it_together(set_constants: SetConstants) -> None:
    set_constants(log_writer, BATCH_S=600.0)
    pipe = Pipe()
    pipe.writer.write("first\n", is_urgent=False)
    assert pipe.read_line() == "first\n"
    for line in "ab":
        pipe.writer.write(f"{line}\n", is_urgent=False)
        assert not pipe.has_line(within_s=0.1)
    pipe.writer.write("urgent\n", is_urgent=True)
    assert pipe.read_line() == "a\nb\nurgent\n"
    pipe.writer.write("after it\n", is_urgent=False)
    pipe.writer.flush()
    assert pipe.read_line() == "after it\n"
    pipe.writer.close()
    pipe.end()


def test_thread_sleeps_once_no_lines_come(set_constants: SetConstants) -> None:
    set_constants(log_writer, BATCH_S=0.001)
    before = {thread.native_id for thread in threading.enumerate()}
    pipe = Pipe()
    (thread,) = {thread.native_id for thread in threading.enumerate()} - before
    pipe.writer.write("first\n", is_urgent=False)
    assert pipe.read_line() == "first\n"
    status = Path(f"/proc/self/task/{thread}/status")
    counts: list[str] = []
    while len(counts) < 2 or counts[-1] != counts[-2]:
        time.sleep(0.1)  # a thread that did not sleep would wake some 100 times
        counts += [line for line in status.read_text().splitlines() if line.startswith("voluntary")]
    pipe.writer.close()
    pipe.end()


def test_lines_of_several_threads_arrive_whole_and_in_the_order_of_each(pipe: Pipe) -> None:
    def write(name: str) -> None:
        for number in range(500):
            pipe.writer.write(f"{name} {number}\n", is_urgent=number % 100 == 0)

    threads = [threading.Thread(target=write, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = [line.split() for line in pipe.read().splitlines()]
    for name in "abc":
        assert [int(number) for of, number in lines if of == name] == [*range(500)]


def test_full_pipe_holds_nobody_up_and_each_lost_line_is_counted(pipe: Pipe) -> None:
    line = f"{'x' * 99}\n"
    n_written = 4 * WAITING_CHARS_MAX // len(line)
    for _ in range(n_written):
        pipe.writer.write(line, is_urgent=False)  # would never return if it waited for a reader
    for _ in range(3):
        pipe.writer.write("urgent\n", is_urgent=True)
    text = pipe.read()
    lost = [int(lines) for lines in LOST.findall(text)]
    assert text.count(line) + sum(lost) == n_written
    assert WAITING_CHARS_MAX <= len(text) < 2.5 * WAITING_CHARS_MAX, (
        "what waits and one batch that is written"
    )
    assert text.count("urgent\n") == 3, "there is room for warnings"
    assert text.endswith(f"urgent\nlost {lost[-1]}\n")


def test_warnings_are_bounded_too(pipe: Pipe) -> None:
    for _ in range(3 * URGENT_CHARS_MAX // 1000):
        pipe.writer.write("x" * 1000, is_urgent=True)
    assert len(pipe.read()) < 2.5 * URGENT_CHARS_MAX


WRITES = """
import sys
from kvrouter.telemetry.log_writer import LogWriter
writer = LogWriter(sys.stderr, str)
print("ready", flush=True)
sys.stdin.readline()
for number in range(10_000):
    writer.write(f"{sys.argv[1]} {number:06d} {'x' * (number % 100)}.\\n", is_urgent=False)
writer.close()
"""


def test_lines_of_processes_that_share_a_pipe_arrive_whole() -> None:
    read_end, write_end = os.pipe()
    fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, 4096)
    pipe = subprocess.PIPE
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITES, name], stdin=pipe, stdout=pipe, stderr=write_end)
        for name in "ab"
    ]
    os.close(write_end)
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n"
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write(b"go\n")
        writer.stdin.flush()
    with os.fdopen(read_end) as reader:
        lines = reader.read().splitlines()
    for writer in writers:
        writer.communicate()
    for name in "ab":
        expected = [f"{name} {number:06d} {'x' * (number % 100)}." for number in range(10_000)]
        assert [line for line in lines if line.startswith(name)] == expected


def test_flush_waits_for_a_reader_that_is_slow_but_reads(
    set_constants: SetConstants, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_constants(log_writer, FLUSH_LIMIT_S=60.0)
    pipe = Pipe()
    for _ in range(20 * 41):
        pipe.writer.write("x" * 99 + "\n", is_urgent=False)
    text = ""

    class AfterOneRead(threading.Event):
        """The time for which a reader may stall has always passed when it has read a piece."""

        def wait(self, timeout: float | None = None) -> bool:
            nonlocal text
            before = pipe.writer._written_bytes
            while not self.is_set() and not pipe.has_line(within_s=0.01):
                pass  # nothing more comes where the last piece was read before it was counted
            if not self.is_set():
                text += pipe.read_line()
            while not self.is_set() and pipe.writer._written_bytes == before:
                super().wait(0.01)
            return self.is_set()

    with monkeypatch.context() as patched:
        patched.setattr(threading, "Event", AfterOneRead)
        pipe.writer.flush()
    assert len(text) >= 78_000, "all but the last piece, which the pipe holds"
    pipe.end()


class Failing(io.StringIO):
    """A stream that raises an error at first."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error: Exception | None = error

    def write(self, text: str) -> int:
        """Write the text, or fail."""
        if self.error is not None:
            raise self.error
        return super().write(text)


@pytest.mark.parametrize("error", [OSError("no space left"), MemoryError()])
def test_lines_that_cannot_be_written_are_counted_once_others_can(error: Exception) -> None:
    stream = Failing(error)
    writer = LogWriter(stream, lost_line)
    for _ in range(2):
        writer.write("a\n", is_urgent=False)
        writer.flush()
    stream.error = None
    writer.write("b\n", is_urgent=False)
    writer.close()
    assert stream.getvalue() == "b\nlost 2\n"


def test_line_after_half_a_line_begins_a_new_one(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    at = tmp_path / "log"
    with at.open("w") as stream:
        writer = LogWriter(stream, lost_line)
        writer.write("whole\n", is_urgent=False)
        writer.flush()
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (8, hard))
            writer.write("half of it\n", is_urgent=False)
            writer.flush()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        writer.write("next\n", is_urgent=False)
        writer.close()
    assert at.read_text() == "whole\nha\nnext\nlost 1\n"


def test_only_lines_that_were_not_written_count_as_lost() -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            if self.tell():
                raise OSError("no space left")
            return super().write(text)

    stream = Full()
    writer = LogWriter(stream, lost_line)
    for _ in range(3):
        writer.write("a" * 4000 + "\n", is_urgent=False)
    writer.close()
    assert (len(stream.getvalue()), writer.lines_lost) == (4001, 2)


def test_non_blocking_descriptor_loses_nothing(pipe: Pipe) -> None:
    os.set_blocking(pipe.stream.fileno(), False)
    for number in range(5000):
        pipe.writer.write(f"{number}\n", is_urgent=False)
    assert pipe.read() == "".join(f"{number}\n" for number in range(5000))


FORKS = """
import os, sys
from kvrouter.telemetry.log_writer import LogWriter
writer = LogWriter(sys.stderr, str)
for number in range(100):
    writer.write(f"parent {number}\\n", is_urgent=False)
child = os.fork()
if not child:
    writer.write("child\\n", is_urgent=False)
    os._exit(0)
os.waitpid(child, 0)
writer.close()
"""


def test_forked_child_writes_its_own_lines_and_none_of_its_parent() -> None:
    ran = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, check=True)
    assert sorted(ran.stderr.splitlines()) == sorted(["child", *(f"parent {at}" for at in range(100))])


ENDS = """
import logging, os, signal, sys
from kvrouter.telemetry import Event, configure_logging, log_event
configure_logging("info", log_format="text")
log = logging.getLogger("kvrouter.test")
def end():
    {how}
log_event(log, Event.DRAIN)
logging.getLogger("elsewhere").warning("foreign")
log.info("ours")
log_event(log, Event.STOP)
end()
"""


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("pass", 0),
        ("sys.exit(3)", 3),
        ("raise RuntimeError", 1),
        ("logging.getLogger('kvrouter').handlers[0].flush(); os._exit(4)", 4),
    ],
)
def test_no_line_is_lost_at_an_exit_and_all_are_in_order(how: str, code: int) -> None:
    program = [sys.executable, "-c", ENDS.format(how=how)]
    ended = subprocess.run(program, capture_output=True, text=True, check=False)
    assert ended.returncode == code
    said = [line.split()[2] for line in ended.stderr.splitlines() if re.match(r"\d{4}-", line)]
    assert said == ["drain", "foreign", "ours", "stop"]


KILLED = ENDS.replace("log_event(log, Event.STOP)", "sys.stdin.readline(); log_event(log, Event.STOP)")


def test_kill_loses_at_most_the_last_batch() -> None:
    program = [sys.executable, "-c", KILLED.format(how="os.kill(os.getpid(), signal.SIGKILL)")]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        before = [process.stderr.readline().split()[2] for _ in range(3)]
        assert before == ["drain", "foreign", "ours"]
        _, rest = process.communicate("go on\n")
    assert process.returncode < 0
    assert rest == "" or rest.split()[2] == "stop"

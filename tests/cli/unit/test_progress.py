"""What commands that take a while show meanwhile, on a terminal and in a job's log, and where."""

import asyncio
import os
import pty
import signal
import sys
import threading
from asyncio.subprocess import PIPE, Process
from pathlib import Path
from typing import Any

import pytest

from kvrouter.cli import main, progress
from kvrouter.cli.progress import Progress, working
from tests.testing.asyncio_servers import port_of, serving_streams
from tests.testing.constants import SetConstants
from tests.testing.processes import default_signals

WORK = """
from kvrouter.cli import progress
progress.SHOWN_AFTER_S = progress.LOGGED_AFTER_S = progress.LOG_INTERVAL_S = 0.01
with progress.working("replaying", total=200) as shown:
    shown.show("kvrouter [seed=1]", done=86)
    input()
print("result")
"""

LIMIT_S = 60.0

LOGGED_AFTER_S = progress.LOGGED_AFTER_S

SHOW_CURSOR = b"\x1b[?25h"

TRACE = Path(__file__).parents[3] / "data" / "mooncake-conversation-sample.jsonl"


class AfterOneLine:
    """An event of which the first wait sees nothing, so that work that ends at once has a line too."""

    def __init__(self, ended: threading.Event) -> None:
        self._ended = ended
        self._waits = 0

    def wait(self, limit_s: float) -> bool:
        self._waits += 1
        return self._waits > 1 and self._ended.wait(limit_s)


@pytest.fixture
def _at_once(set_constants: SetConstants, monkeypatch: pytest.MonkeyPatch) -> None:
    set_constants(progress, LOGGED_AFTER_S=0.0001, LOG_INTERVAL_S=0.0001)
    log: Any = progress._log
    monkeypatch.setattr(progress, "_log", lambda shown, ended: log(shown, AfterOneLine(ended)))


async def worked(stderr: int) -> Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", WORK),
        stdin=PIPE,
        stdout=PIPE,
        stderr=stderr,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "100"},
        preexec_fn=default_signals,
    )


async def test_progress_in_a_log_is_lines_and_the_result_stays_clean() -> None:
    process = await worked(PIPE)
    assert process.stderr is not None
    async with asyncio.timeout(LIMIT_S):
        while b"43%" not in (line := await process.stderr.readline()):
            assert line
    assert line.startswith(b"kvrouter: kvrouter [seed=1]: 43%, ")
    assert line.endswith(b" s left\n")
    assert b"\x1b" not in line
    assert (await process.communicate(b"\n"))[0] == b"result\n"


async def test_progress_on_a_terminal_is_one_line_that_goes() -> None:
    user, program = pty.openpty()
    process = await worked(program)
    drawn = b""
    while drawn.count(b"kvrouter [seed=1]: 43%") < 2:
        drawn += await asyncio.to_thread(os.read, user, 65536)
    assert b"\n" not in drawn
    assert (await process.communicate(b"\n"))[0] == b"result\n"
    os.close(program)
    drawn += await asyncio.to_thread(os.read, user, 65536)
    assert b"\x1b[2K" in drawn.rpartition(b"43%")[2], "it is erased"
    os.close(user)


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
async def test_a_signal_that_ends_the_work_leaves_the_cursor_shown(ending: signal.Signals) -> None:
    user, program = pty.openpty()
    process = await worked(program)
    drawn = b""
    while b"kvrouter [seed=1]: 43%" not in drawn:
        drawn += await asyncio.to_thread(os.read, user, 65536)
    process.send_signal(ending)
    async with asyncio.timeout(LIMIT_S):
        assert await process.wait() == 128 + ending
    os.close(program)
    drawn += await asyncio.to_thread(os.read, user, 65536)
    assert SHOW_CURSOR in drawn
    os.close(user)


def test_line_says_how_far_the_work_is_and_how_long_it_still_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr("kvrouter.cli.progress.time.monotonic", lambda: now_s)
    shown = Progress("replaying", 200.0)
    now_s = 112.0
    assert shown.line == "replaying: 0%, 12 s"
    shown.show(done=50.0)
    assert shown.line == "replaying: 25%, 12 s, about 36 s left"
    shown.show("the last one", done=400.0)
    assert shown.line == "the last one: 100%, 12 s, about 0 s left"
    assert Progress("reading", None).line == "reading: 0 s"


def test_first_line_in_a_log_comes_after_a_second(
    set_constants: SetConstants, capsys: pytest.CaptureFixture[str]
) -> None:
    set_constants(progress, LOGGED_AFTER_S=LOGGED_AFTER_S)
    waited_s: list[float] = []

    class Ended(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waited_s.append(timeout or 0.0)
            return len(waited_s) == 3

    progress._log(Progress("reading", None), Ended())
    assert waited_s == [1.0, 10.0, 10.0]
    assert capsys.readouterr().err == "kvrouter: reading: 0 s\n" * 2


def test_work_that_is_done_at_once_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with working("asking"):
        pass
    with pytest.raises(KeyboardInterrupt), working("asking"):
        raise KeyboardInterrupt
    assert capsys.readouterr() == ("", "")


@pytest.mark.usefixtures("_at_once")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["replay", str(TRACE), "--rows", "20"], "kvrouter: reading "),
        (["replay", str(TRACE), "--rows", "20"], "kvrouter: replaying kvrouter: "),
        (["fleet", "check", str(TRACE)], f"kvrouter: checking {TRACE}: "),
    ],
)
def test_command_over_a_file_says_what_it_does(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main(arguments)
    assert f"\n{said}" in "\n" + capsys.readouterr().err


@pytest.mark.usefixtures("_at_once")
@pytest.mark.parametrize(
    "arguments",
    [
        ["explain", "hello"],
        ["explain", "--request-id", "r"],
        ["top", "--once"],
        ["top"],
        ["doctor"],
        ["fleet", "show"],
        ["cordon"],
        ["cordon", "zone", "a"],
        ["drain", "zone", "a"],
        ["uncordon", "zone", "a"],
    ],
    ids=" ".join,
)
async def test_command_that_waits_for_a_router_says_so(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    is_seen = asyncio.Event()

    async def answer_nothing(*_: object) -> None:
        await is_seen.wait()

    async with serving_streams(answer_nothing) as server:
        url = f"http://127.0.0.1:{port_of(server)}"
        command = asyncio.create_task(asyncio.to_thread(main, [*arguments, "--url", url]))
        said = ""
        while f"kvrouter: asking {url}" not in said:
            assert not command.done(), said
            await asyncio.sleep(0.001)
            said += capsys.readouterr().err
        is_seen.set()
        assert await command in {1, 2}
    assert capsys.readouterr().out == ""

"""What the processes of one command write, copied to its own standard error."""

import asyncio
import os

import pytest

from kvrouter.app.supervisor import copy_lines
from kvrouter.telemetry import configure_logging
from kvrouter.telemetry.log_writer import WAITING_CHARS_MAX
from kvrouter.telemetry.logs import close_log, lines_lost, log_output

LIMIT_BYTES = 64


async def test_overlong_line_is_dropped_and_the_next_is_copied(capsys: pytest.CaptureFixture[str]) -> None:
    lines = asyncio.StreamReader(limit=LIMIT_BYTES)
    lines.feed_data(b"first\n" + b"x" * 3 * LIMIT_BYTES + b"\nlast\n")
    lines.feed_eof()
    await copy_lines("worker a/0", lines, lambda: False)
    assert capsys.readouterr().err.splitlines() == [
        "worker a/0 | first",
        "worker a/0 | … a line too long to show",
        "worker a/0 | last",
    ]


async def test_child_waits_for_who_reads_its_parent_and_loses_nothing() -> None:
    n_lines = 3 * WAITING_CHARS_MAX // 100
    read_end, write_end = os.pipe()
    lines = asyncio.StreamReader()
    lines.feed_data(b"".join(b"%099d\n" % number for number in range(n_lines)))
    lines.feed_eof()
    is_waiting = asyncio.Event()

    def is_half_full() -> bool:
        output = log_output()
        return output is not None and output.writer.is_half_full

    def is_running() -> bool:
        if is_half_full():
            is_waiting.set()
        return True

    with os.fdopen(read_end) as reader, os.fdopen(write_end, "w") as stream:
        configure_logging("info", log_format="text", stream=stream)
        copying = asyncio.create_task(copy_lines("a", lines, is_running))
        await is_waiting.wait()
        reading = asyncio.create_task(asyncio.to_thread(reader.readlines))
        await copying
        lost = lines_lost()
        await asyncio.to_thread(close_log)
        stream.close()
        assert lost == 0
        assert await reading == [f"a | {number:099d}\n" for number in range(n_lines)]


async def test_last_lines_of_an_ended_child_wait_for_nobody() -> None:
    read_end, write_end = os.pipe()
    lines = asyncio.StreamReader()
    lines.feed_data((b"x" * 99 + b"\n") * (WAITING_CHARS_MAX // 100) + b"its last words\n")
    lines.feed_eof()
    with os.fdopen(read_end) as reader, os.fdopen(write_end, "w") as stream:
        configure_logging("info", log_format="text", stream=stream)
        await copy_lines("a", lines, lambda: False)
        reading = asyncio.create_task(asyncio.to_thread(reader.readlines))
        await asyncio.to_thread(close_log)
        stream.close()
        assert (await reading)[-1] == "a | its last words\n"

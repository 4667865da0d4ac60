"""What the processes of one command write, copied to its own standard error."""

import asyncio

import pytest

from kvrouter.app.supervisor import copy_lines

LIMIT_BYTES = 64


async def test_overlong_line_is_dropped_and_the_next_is_copied(capsys: pytest.CaptureFixture[str]) -> None:
    lines = asyncio.StreamReader(limit=LIMIT_BYTES)
    lines.feed_data(b"first\n" + b"x" * 3 * LIMIT_BYTES + b"\nlast\n")
    lines.feed_eof()
    await copy_lines("worker a/0", lines)
    assert capsys.readouterr().err.splitlines() == [
        "worker a/0 | first",
        "worker a/0 | … a line too long to show",
        "worker a/0 | last",
    ]

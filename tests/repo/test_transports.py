"""What a test leaves open is reported by name, and what ends by itself is waited for."""

import asyncio
import sys

import pytest

from tests.testing.asyncio_servers import port_of, serving_streams
from tests.testing.asyncio_transports import track_transports

PROGRAM = (sys.executable, "-c", "input()")


async def answer(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
    await reader.read()


async def test_an_unclosed_connection_is_reported_with_its_opener() -> None:
    async with serving_streams(answer) as server:
        with track_transports() as transports:
            _, writer = await asyncio.open_connection("127.0.0.1", port_of(server))
            assert isinstance(writer.transport, asyncio.ReadTransport)
            writer.transport.pause_reading()  # the loop watches it no more: only who opened it knows of it
            with pytest.raises(AssertionError, match="_SelectorSocketTransport") as reported:
                await transports.until_ended(limit_s=0.2)
            assert __file__ in str(reported.value)
            writer.close()
            await transports.until_ended()


async def test_a_process_that_ends_by_itself_is_awaited() -> None:
    with track_transports() as transports:
        process = await asyncio.create_subprocess_exec(*PROGRAM, stdin=asyncio.subprocess.PIPE)
        assert len(transports.left()) == 1
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.close()
        await transports.until_ended()
        assert await process.wait() == 0

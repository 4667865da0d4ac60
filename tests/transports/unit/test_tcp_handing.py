"""Tokens that the tcp request plane hands to their reader in the turn in which they arrive."""

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.core.errors import ProtocolError
from kvrouter.core.requests import EngineChunk, FinishReason
from kvrouter.transports.requests.leg_stream import SessionStream
from kvrouter.transports.requests.port import StreamBroken
from tests.testing.scripted_worker import leg


class Connection:
    """Notes what a stream says to its worker."""

    address = "tcp://127.0.0.1:1/1/1"

    def __init__(self) -> None:
        self.credits: list[int] = []
        self.cancelled: list[str] = []

    def give_credit(self, stream_id: int, tokens: int) -> None:
        assert stream_id == 0
        self.credits.append(tokens)

    def cancel_stream(self, stream_id: int, reason: str) -> None:
        assert stream_id == 0
        self.cancelled.append(reason)


class Reader:
    """A sink that takes ``wants`` times, and the task that waits in ``hand_over``."""

    def __init__(self, wants: int = 1000) -> None:
        self.taken: list[int] = []
        self.wants = wants

    def take(self, token_ids: Sequence[int]) -> bool:
        self.taken += token_ids
        self.wants -= 1
        return self.wants > 0

    async def begin(self, stream: SessionStream) -> "asyncio.Task[None]":
        task = asyncio.create_task(stream.hand_over(self.take))
        await asyncio.sleep(0)
        return task


def new_stream(connection: Connection, *, credit_tokens: int = 100) -> SessionStream:
    stream = SessionStream(connection, 0, credit_tokens=credit_tokens, request=leg())
    stream.accept()
    return stream


@pytest.fixture
def connection() -> Connection:
    return Connection()


async def test_tokens_are_taken_before_the_push_returns(connection: Connection) -> None:
    stream, reader = new_stream(connection), Reader()
    task = await reader.begin(stream)
    stream.push_tokens((1, 2))
    stream.push_tokens((3,))
    assert reader.taken == [1, 2, 3]
    assert not task.done()
    stream.cancel("enough")
    await task


async def test_chunk_with_more_than_tokens_waits_for_the_next_read(connection: Connection) -> None:
    stream, reader = new_stream(connection), Reader()
    task = await reader.begin(stream)
    stream.push_tokens((1,))
    stream.push(EngineChunk((2,), FinishReason.STOP))
    await task
    assert reader.taken == [1]
    assert await anext(stream) == EngineChunk((2,), FinishReason.STOP)


async def test_a_sink_that_has_enough_leaves_the_rest_to_the_next_read(connection: Connection) -> None:
    stream, reader = new_stream(connection), Reader(wants=1)
    task = await reader.begin(stream)
    for token in (1, 2, 3):
        stream.push_tokens((token,))
    await task
    assert reader.taken == [1]
    assert (await anext(stream)).token_ids == (2, 3)


async def test_tokens_waiting_before_a_handover_are_left_to_the_next_read(connection: Connection) -> None:
    stream, reader = new_stream(connection), Reader()
    stream.push_tokens((1,))
    await stream.hand_over(reader.take)
    assert reader.taken == []
    assert (await anext(stream)).token_ids == (1,)


async def test_exception_in_the_sink_is_raised_and_the_stream_goes_on(connection: Connection) -> None:
    stream = new_stream(connection)

    def take(_: Sequence[int]) -> bool:
        raise ValueError("no text")

    task = asyncio.create_task(stream.hand_over(take))
    await asyncio.sleep(0)
    stream.push_tokens((1,))
    with pytest.raises(ValueError, match="no text"):
        await task
    stream.push_tokens((2,))
    assert (await anext(stream)).token_ids == (2,)


async def test_lost_connection_ends_the_handover_and_the_next_read_says_why(
    connection: Connection,
) -> None:
    stream, reader = new_stream(connection), Reader()
    task = await reader.begin(stream)
    stream.break_off("the worker died")
    await task
    with pytest.raises(StreamBroken, match="the worker died"):
        await anext(stream)


async def test_a_reader_that_is_cancelled_takes_no_more(connection: Connection) -> None:
    stream, reader = new_stream(connection), Reader()
    task = await reader.begin(stream)
    task.cancel()
    await asyncio.wait([task])
    stream.push_tokens((1,))
    assert reader.taken == []


async def test_a_worker_that_sends_more_than_its_credit_is_refused(connection: Connection) -> None:
    stream, reader = new_stream(connection, credit_tokens=4), Reader()
    task = await reader.begin(stream)
    with pytest.raises(ProtocolError, match="credit"):
        stream.push_tokens((1, 2, 3, 4, 5))
    assert reader.taken == []
    stream.cancel("refused")
    await task


@given(sizes=st.lists(st.integers(1, 5), max_size=60), credit_tokens=st.integers(5, 40), stops=st.data())
async def test_tokens_read_or_handed_over_arrive_once_and_are_credited(
    sizes: list[int], credit_tokens: int, stops: st.DataObject
) -> None:
    connection, taken, sent = Connection(), list[int](), 0
    stream = new_stream(connection, credit_tokens=credit_tokens)
    reader = Reader(stops.draw(st.integers(1, 4)))
    task = await reader.begin(stream)
    for size in sizes:
        if sent + size > credit_tokens + sum(connection.credits):
            break
        stream.push_tokens(tuple(range(sent, sent + size)))
        sent += size
        if reader.wants <= 0:
            await task
            taken, reader.taken = taken + reader.taken, []
            if len(taken) < sent:
                taken += (await anext(stream)).token_ids
            reader = Reader(stops.draw(st.integers(1, 4)))
            task = await reader.begin(stream)
    taken += reader.taken
    assert taken == list(range(sent))
    assert 0 <= sent - sum(connection.credits) < max(1, credit_tokens // 2)
    stream.cancel("over")
    await task

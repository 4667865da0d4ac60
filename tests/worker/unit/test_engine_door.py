"""The engine door, frame by frame: who is let in, what ends a conversation; nothing ends the worker."""

import asyncio
import logging
import socket
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrouter.core.errors import ConfigError
from kvrouter.core.events import Cleared, Medium, Removed, Stored, pack_hashes
from kvrouter.core.ids import DpRank, EngineHash
from kvrouter.worker.engine_door import (
    CONNECTIONS_MAX,
    FRAME_BYTES_MAX,
    TOKEN_BYTES_MAX,
    VERSION,
    ListenAddress,
)
from tests.testing.engine_door import BLOCK_SIZE, TOKEN, EngineDoorHarness, open_engine_door
from tests.testing.log_events import event_of, events_of
from tests.testing.waits import LIMIT_S, until

HELLO, REPLACE, STORED, REMOVED, LOAD, SYNC = range(6)
WELCOME, REFUSED, SYNCED = range(3)
ONE = pack_hashes([1])
KNOCK = (HELLO, VERSION, BLOCK_SIZE)


class Caller:
    """An engine's end, by hand."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer

    def send(self, payload: bytes) -> None:
        self.writer.write(len(payload).to_bytes(4, "big") + payload)

    def say(self, *frame: object) -> None:
        self.send(msgspec.msgpack.encode(frame))

    async def hear(self) -> list[object] | None:
        """The door's next word; None when it closed."""
        try:
            async with asyncio.timeout(LIMIT_S):
                n_bytes = int.from_bytes(await self._reader.readexactly(4), "big")
                return msgspec.msgpack.decode(await self._reader.readexactly(n_bytes), type=list)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    async def is_refused(self, reason: str) -> bool:
        """Whether the door says exactly this, and closes."""
        return [await self.hear(), await self.hear()] == [[REFUSED, reason], None]


@asynccontextmanager
async def caller(harness: EngineDoorHarness) -> AsyncIterator[Caller]:
    place = ListenAddress.parse(harness.door.address)
    if place.path is None:
        ends = await asyncio.open_connection(place.host, place.port)
    else:
        ends = await asyncio.open_unix_connection(place.path)
    try:
        yield Caller(*ends)
    finally:
        ends[1].close()


@asynccontextmanager
async def friend(harness: EngineDoorHarness, *dp_ranks: int) -> AsyncIterator[Caller]:
    """A caller that is in, and tells of these ranks."""
    async with caller(harness) as who:
        who.send(TOKEN.encode())
        who.say(*KNOCK)
        assert await who.hear() == [WELCOME, VERSION]
        for dp_rank in dp_ranks:
            who.say(REPLACE, dp_rank)
        who.say(SYNC, 2**64 - 1)
        assert await who.hear() == [SYNCED, 2**64 - 1]
        yield who


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[EngineDoorHarness]:
    async with open_engine_door(f"unix:{tmp_path}/door") as here:
        yield here


def events(harness: EngineDoorHarness) -> list[object]:
    return [event for batch in harness.batches for event in batch.events]


async def test_engine_events_are_published_and_cleared_when_it_disconnects(
    harness: EngineDoorHarness,
) -> None:
    async with friend(harness, 0, 1) as who:
        who.say(STORED, 1, Medium.CPU, None, ONE, pack_hashes([11]))
        who.say(STORED, 1, Medium.GPU, 1, pack_hashes([2]), pack_hashes([22]))
        who.say(REMOVED, 1, Medium.CPU, ONE)
        who.say(SYNC, 5)
        assert await who.hear() == [SYNCED, 5]
        reported = [
            Stored(None, ONE, pack_hashes([11]), Medium.CPU),
            Stored(EngineHash(1), pack_hashes([2]), pack_hashes([22])),
            Removed(ONE, Medium.CPU),
        ]
        assert events(harness) == [Cleared(), Cleared(), *reported]
        assert {batch.rank.dp_rank for batch in harness.batches if reported[-1] in batch.events} == {1}
        assert harness.door.dp_ranks == {0, 1}
    await until(lambda: events(harness)[5:] == [Cleared(), Cleared()])
    assert harness.door.dp_ranks == frozenset()


async def test_the_load_of_an_engine_that_left_is_not_repeated(harness: EngineDoorHarness) -> None:
    async with friend(harness, 0, 1) as who:
        who.say(LOAD, 1, 3, 8, 0, 1, 0)
        who.say(SYNC, 1)
        assert await who.hear() == [SYNCED, 1]
        harness.publisher.heartbeat([])
        assert [(load.rank.dp_rank, load.active_blocks) for load in harness.loads] == [(1, 3), (1, 3)]
    await until(lambda: not harness.door.dp_ranks)
    harness.publisher.heartbeat([])
    assert len(harness.loads) == 2


async def test_a_connection_without_the_token_is_refused(harness: EngineDoorHarness) -> None:
    async with caller(harness) as stranger:
        stranger.send(b"a guess")
        stranger.send(b"\xc1 is no msgpack at all")
        assert await stranger.is_refused("its token is not the worker's")
    async with caller(harness) as stranger:
        stranger.writer.write(b"GET / HTTP/1.1\r\n\r\n")
        assert await stranger.is_refused(f"a frame of {0x47455420} bytes is longer than {TOKEN_BYTES_MAX}")


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        ((HELLO, VERSION + 1, BLOCK_SIZE), f"it speaks version {VERSION + 1}, the worker {VERSION}"),
        ((HELLO, VERSION, 16), f"its block_size is 16 tokens, the worker's {BLOCK_SIZE}"),
        ((REPLACE, 0), "it does not begin with a hello"),
        ((HELLO,), "frame: Expected `array` of at least length 3, got 1"),
    ],
)
async def test_an_invalid_hello_is_refused(
    harness: EngineDoorHarness, frame: tuple[int, ...], reason: str
) -> None:
    async with caller(harness) as who:
        who.send(TOKEN.encode())
        who.say(*frame)
        assert await who.is_refused(reason)


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        ((STORED, 1, 0, None, ONE, ONE), "it tells of dp_rank 1, which it did not claim"),
        ((LOAD, 1, 0, 0, 0, 0, 0), "it tells of dp_rank 1, which it did not claim"),
        ((REPLACE, 9), "the worker has no dp_rank 9"),
        ((STORED, 0, 7, None, ONE, ONE), "frame: Invalid enum value 7 - at `$[2]`"),
        ((STORED, 0, 0, -1, ONE, ONE), "frame: Expected `int` >= 0 - at `$[3]`"),
        (
            (STORED, 0, 0, None, ONE, b""),
            "engine_hashes and block_hashes: two columns of the same number of 8-byte hashes, "
            "not 8 and 0 bytes",
        ),
        ((REMOVED, 0, 0, b"short"), "engine_hashes: 5 bytes are no column of hashes"),
        ((LOAD, 0, -1, 0, 0, 0, 0), "frame: Expected `int` >= 0 - at `$[2]`"),
        ((17, 0), "frame: Invalid value 17 - at `$[0]`"),
        (KNOCK, "it says hello twice"),
    ],
)
async def test_an_invalid_frame_ends_the_connection_and_clears_its_rank(
    harness: EngineDoorHarness, frame: tuple[object, ...], reason: str
) -> None:
    async with friend(harness, 0) as who:
        who.say(STORED, 0, Medium.GPU, None, ONE, ONE)
        who.say(*frame)
        assert await who.is_refused(reason)
        assert not harness.believed(DpRank(0))
    async with friend(harness, 0):
        pass


async def test_a_frame_longer_than_the_limit_is_refused_at_its_length(harness: EngineDoorHarness) -> None:
    async with friend(harness, 0) as who:
        who.writer.write((FRAME_BYTES_MAX + 1).to_bytes(4, "big"))
        assert await who.is_refused(
            f"a frame of {FRAME_BYTES_MAX + 1} bytes is longer than {FRAME_BYTES_MAX}"
        )


async def test_a_silent_connection_is_closed(tmp_path: Path) -> None:
    async with open_engine_door(f"unix:{tmp_path}/door", silence_s=0.05) as harness, caller(harness) as who:
        who.send(TOKEN.encode())
        who.say(*KNOCK)
        assert await who.hear() == [WELCOME, VERSION]
        assert await who.is_refused("it said nothing for 0.05 s")


async def test_the_newest_connection_takes_over_a_claimed_rank(harness: EngineDoorHarness) -> None:
    async with friend(harness, 0, 1) as old, friend(harness, 1) as new:
        assert await old.is_refused("a newer connection tells of dp_rank 1")
        assert harness.door.dp_ranks == {1}
        new.say(STORED, 1, Medium.GPU, None, ONE, ONE)
        new.say(SYNC, 1)
        await new.hear()
        assert len(harness.believed(DpRank(1))) == 1


async def test_a_connection_over_the_limit_is_refused_until_others_close(harness: EngineDoorHarness) -> None:
    place = ListenAddress.parse(harness.door.address)
    assert place.path is not None
    ends = [await asyncio.open_unix_connection(place.path) for _ in range(CONNECTIONS_MAX)]
    async with caller(harness) as late:
        assert await late.is_refused(f"{CONNECTIONS_MAX} connections are open already")
    for _, writer in ends:
        writer.close()

    async def is_in() -> bool:
        async with caller(harness) as who:
            who.send(TOKEN.encode())
            who.say(*KNOCK)
            return await who.hear() == [WELCOME, VERSION]

    while not await is_in():  # noqa: ASYNC110 - each try is a turn of the door's
        await asyncio.sleep(0)


async def test_refusals_joins_and_leaves_are_logged_without_frame_content(
    harness: EngineDoorHarness, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvrouter")
    async with caller(harness) as stranger:
        stranger.send(b"a guess")
        await stranger.hear()
    async with friend(harness, 0):
        pass
    await until(lambda: len(caplog.records) == 3)
    reported = [(event_of(record), getattr(record, "kvrouter_fields")) for record in caplog.records]  # noqa: B009
    assert reported == [
        ("engine_refused", {"worker": "7", "reason": "its token is not the worker's"}),
        ("engine_joined", {"worker": "7"}),
        ("engine_left", {"worker": "7", "reason": "its connection ended"}),
    ]


async def test_repeated_wrong_tokens_are_logged_once(
    harness: EngineDoorHarness, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvrouter")
    for _ in range(3):
        async with caller(harness) as stranger:
            stranger.send(b"a guess")
            assert await stranger.is_refused("its token is not the worker's")
    async with friend(harness, 0):
        await until(lambda: "engine_joined" in events_of(caplog.records))
    assert events_of(caplog.records).count("engine_refused") == 1


async def test_stopping_the_door_notifies_engines_and_clears_their_ranks(harness: EngineDoorHarness) -> None:
    async with friend(harness, 0) as who:
        await harness.door.stop()
        await harness.door.stop()
        assert await who.is_refused("the worker's door is closed")
        assert events(harness) == [Cleared(), Cleared()]


async def test_tcp_port_zero_gets_a_free_port(tmp_path: Path) -> None:
    async with open_engine_door("tcp://127.0.0.1:0") as harness:
        assert not harness.door.address.endswith(":0")
        async with friend(harness, 0):
            pass


async def test_socket_file_is_private_exclusive_and_removed_with_the_door(tmp_path: Path) -> None:
    path = tmp_path / "door"
    async with open_engine_door(f"unix:{path}"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with pytest.raises(ConfigError, match="somebody listens at"):
            async with open_engine_door(f"unix:{path}"):
                pass
    assert not path.exists()
    with closing(socket.socket(socket.AF_UNIX)) as leftover:
        leftover.bind(str(path))
    async with open_engine_door(f"unix:{path}") as harness, friend(harness, 0):
        pass


@pytest.mark.parametrize(
    "address",
    ["", "door", "unix:door", "tcp://1.2.3.4", "tcp://:1", "tcp://a:65536", "tcp://a:b", "http://a:1"],
)
async def test_an_invalid_door_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="neither unix:/path nor tcp://host:port") as caught:
        EngineDoorHarness(address)
    assert caught.value.param == "address"


async def test_an_address_that_cannot_be_bound_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot listen at"):
        await EngineDoorHarness(f"unix:{tmp_path}/none/door").door.start()
    with pytest.raises(ConfigError, match="cannot listen at"):
        await EngineDoorHarness(f"unix:{tmp_path}/{'x' * 200}").door.start()


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "some.host", "[::]"])
async def test_a_non_loopback_door_needs_a_token(host: str) -> None:
    with pytest.raises(ConfigError, match="token: must be set") as caught:
        EngineDoorHarness(f"tcp://{host}:7000", token="")
    assert caught.value.param == "token"
    assert EngineDoorHarness(f"tcp://{host}:7000").door.address == f"tcp://{host}:7000"


async def test_a_token_over_1024_bytes_is_refused() -> None:
    with pytest.raises(ConfigError, match="token: is longer than 1024 bytes"):
        EngineDoorHarness("unix:/door", token="x" * 1025)


small = st.integers(-1, 6)
frames = st.one_of(
    st.binary(max_size=40),
    st.lists(
        st.one_of(small, st.none(), st.binary(max_size=17), st.just(ONE), st.text(max_size=3), st.floats()),
        max_size=7,
    ).map(msgspec.msgpack.encode),
)


@settings(max_examples=60)
@given(st.lists(frames, max_size=8), st.booleans())
async def test_any_frames_leave_the_door_serving_the_next_connection(
    said: list[bytes], is_friend: bool
) -> None:
    """Whatever one connection says, the next one is served, and holds what it says alone."""
    async with open_engine_door("tcp://127.0.0.1:0") as harness:
        async with caller(harness) as who:
            if is_friend:
                who.send(TOKEN.encode())
                who.say(*KNOCK)
                who.say(REPLACE, 0)
            for frame in said:
                who.send(frame)
            who.writer.write_eof()
            while await who.hear() is not None:
                pass
        async with friend(harness, 0) as who:
            who.say(STORED, 0, Medium.GPU, None, ONE, pack_hashes([5]))
            who.say(SYNC, 1)
            await who.hear()
            assert set(harness.believed(DpRank(0))) == {(Medium.GPU, 1, 5)}

"""Whoever says something wrong between processes of mock engines is refused with a reason; nobody crashes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest
from msgspec.structs import replace

from kvrouter.app.mock_fleet import mock_summary
from kvrouter.core.errors import ConfigError
from kvrouter.core.ids import WorkerId
from kvrouter.core.requests import FinishReason, Leg
from kvrouter.core.workers import Role
from kvrouter.engines.mock import MockCluster, MockStream, PeerRefusal, TransferSettings
from kvrouter.engines.mock.transfer import (
    FRAME_BYTES_MAX,
    HELLO,
    HELLO_BYTES_MAX,
    Alive,
    encode_hello,
    encode_message,
)
from kvrouter.engines.mock_engine.config import MockConfig
from kvrouter.engines.mock_engine.remote import Done, Failed, GiveUp, Join, Peer, Ready, SinkMessage, Want
from tests.testing.asyncio_servers import port_of, serving_streams
from tests.testing.mock_engine import zone
from tests.testing.mock_processes import (
    IN_TIME_S,
    SETTINGS,
    SLOW_LINKS,
    TOKEN,
    Pair,
    processes,
    read_all,
    start,
)

NAN = float("nan")
IMPATIENT = replace(SETTINGS, keep_alive_s=0.05, silence_max_s=0.2, linger_s=0.2)


def frame(payload: bytes) -> bytes:
    return len(payload).to_bytes(4, "big") + payload


def joins(pair: Pair, room: int = 5) -> bytes:
    return encode_message(Join(f"{pair.peer.host}:{pair.peer.port}/{room}", 60.0, True))


async def answers(pair: Pair, *said: bytes) -> list[object]:
    """Say something to the prefill process; return its words until it closes, without the signs of life."""
    async with asyncio.timeout(IN_TIME_S):
        reader, writer = await asyncio.open_connection(*pair.peer)
        writer.write(b"".join(said))
        heard = await reader.read()
        writer.close()
    words: list[object] = []
    while heard:
        end = 4 + int.from_bytes(heard[:4], "big")
        words.append(msgspec.msgpack.decode(heard[4:end], type=Ready | Failed | Alive))
        heard = heard[end:]
    return [word for word in words if not isinstance(word, Alive)]


def hello() -> bytes:
    return encode_hello(TOKEN)


def packed(**fields: object) -> bytes:
    return frame(msgspec.msgpack.encode(fields))


STRANGERS = {
    "http": (b"GET / HTTP/1.1\r\n\r\n", PeerRefusal.TOO_LARGE),
    "another protocol": (frame(b"hello"), PeerRefusal.STRANGER),
    "an empty frame": (frame(b""), PeerRefusal.STRANGER),
    "another version": (frame(HELLO + b"1 " + TOKEN.encode()), PeerRefusal.VERSION),
    "another token": (encode_hello("open"), PeerRefusal.TOKEN),
    "no token": (encode_hello(""), PeerRefusal.TOKEN),
    "a long hello": (frame(HELLO + b"2 " + b"x" * HELLO_BYTES_MAX), PeerRefusal.TOO_LARGE),
    "garbage after the hello": (hello() + frame(b"\xc1\xff\x00garbage"), PeerRefusal.MALFORMED),
    "a huge frame after the hello": (
        hello() + (FRAME_BYTES_MAX + 1).to_bytes(4, "big"),
        PeerRefusal.TOO_LARGE,
    ),
    "the largest length": (hello() + b"\xff" * 4, PeerRefusal.TOO_LARGE),
    "a word of a source": (hello() + encode_message(Ready(1, 1, zone("a"))), PeerRefusal.MALFORMED),
    "no expiry": (
        hello() + packed(type="Join", meeting="x/y", expiry_s=NAN, may_follow=True),
        PeerRefusal.MALFORMED,
    ),
    "a negative count": (hello() + encode_message(Want(-1)), PeerRefusal.MALFORMED),
    "an unknown field": (hello() + packed(type="Done", more=1), PeerRefusal.MALFORMED),
    "no word": (hello() + packed(type="Give", kv_tokens=1), PeerRefusal.MALFORMED),
    "bad text": (hello() + frame(b"\x82\xa4type\xa6GiveUp\xa6reason\xa2\xff\xff"), PeerRefusal.MALFORMED),
    "want before join": (hello() + encode_message(Want(1)), PeerRefusal.OUT_OF_ORDER),
    "done before join": (hello() + encode_message(Done()), PeerRefusal.OUT_OF_ORDER),
    "give up before join": (hello() + encode_message(GiveUp("x")), PeerRefusal.OUT_OF_ORDER),
}


@pytest.mark.parametrize("name", list(STRANGERS))
async def test_invalid_opening_is_refused_and_others_are_served(name: str) -> None:
    said, refusal = STRANGERS[name]
    async with processes() as pair:
        (last,) = await answers(pair, said)
        assert isinstance(last, Failed)
        assert last.reason
        assert pair.prefill_cluster.transfer_counts().refused == {refusal: 1}
        assert len((await read_all(await handoff(pair)))[0]) == 20, "others are served as before"
        await pair.until_idle()


async def handoff(pair: Pair) -> MockStream:
    await pair.send(Leg.PREFILL, room=9)
    return await pair.send(Leg.DECODE, room=9)


@pytest.mark.parametrize("words", [[Join("a/b", 1.0, True)], [Want(1), Want(1)], [Done()], [Want(1), Done()]])
async def test_messages_out_of_order_end_the_handoff(words: list[SinkMessage]) -> None:
    async with processes() as pair:
        said = [encode_message(word) for word in words]
        last = (await answers(pair, hello(), joins(pair), *said))[-1]
        assert isinstance(last, Failed)
        assert "does not belong here" in last.reason
        assert pair.prefill_cluster.transfer_counts().refused == {PeerRefusal.OUT_OF_ORDER: 1}
        await pair.until_idle()


async def test_frames_may_come_byte_by_byte() -> None:
    async with processes() as pair:
        _, writer = await asyncio.open_connection(*pair.peer)
        for byte in hello() + joins(pair):
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0)
        await pair.until_joined()
        writer.close()
        await pair.until_idle()


async def test_hello_without_a_handoff_is_refused_after_a_time() -> None:
    impatient = replace(SETTINGS, hello_timeout_s=0.1)
    async with processes(prefill_settings=impatient) as pair:
        (last,) = await answers(pair, hello())
        assert isinstance(last, Failed)
        assert pair.prefill_cluster.transfer_counts().refused == {PeerRefusal.STRANGER: 1}
        assert mock_summary(pair.prefill_cluster) == "1 connections refused: stranger"


async def test_silent_decode_process_ends_its_handoff() -> None:
    async with processes(prefill_settings=IMPATIENT, expiry_s=0.3) as pair:
        await pair.send(Leg.PREFILL, room=5)
        words = await answers(pair, hello(), joins(pair), encode_message(Want(100)))
        assert isinstance(words[0], Ready)
        assert words[0].src.domains == {"zone": "a"}
        assert isinstance(words[-1], Failed)
        assert pair.prefill_cluster.transfer_counts().refused == {PeerRefusal.SILENT: 1}
        await pair.until_idle()


async def test_connection_over_the_limit_is_refused() -> None:
    async with processes(prefill_settings=replace(SETTINGS, connections_max=1)) as pair:
        first = await pair.send(Leg.DECODE, "x", room=1)
        await pair.until_joined()
        second = await pair.send(Leg.DECODE, "y", room=2)
        _, last = await read_all(second)
        assert "too many connections" in (last.error or "")
        first.cancel("enough")
        await pair.until_idle()


async def test_decode_process_with_another_token_is_refused() -> None:
    async with processes(decode_settings=replace(SETTINGS, token="open")) as pair:
        _, last = await read_all(await pair.send(Leg.DECODE, room=5))
        assert last.finish is FinishReason.ERROR
        assert "token" in (last.error or "")
        await pair.until_idle()


@asynccontextmanager
async def false_source(says: bytes) -> AsyncIterator[Peer]:
    """Listens as a prefill process would, says something, and reads on."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(says)
        try:
            while await reader.read(1_000):
                pass
        except ConnectionError:
            pass

    async with serving_streams(serve) as server:
        yield Peer("127.0.0.1", port_of(server))


FALSE_SOURCES = {
    "nothing": (b"", PeerRefusal.SILENT),
    "http": (b"HTTP/1.1 400 Bad Request\r\n\r\n", PeerRefusal.TOO_LARGE),
    "garbage": (frame(b"\xc1"), PeerRefusal.MALFORMED),
    "a word of a sink": (encode_message(Done()), PeerRefusal.MALFORMED),
    "ready twice": (encode_message(Ready(1, 1_000_000, zone("a"))) * 2, PeerRefusal.OUT_OF_ORDER),
}


@pytest.mark.parametrize("name", list(FALSE_SOURCES))
async def test_misbehaving_source_fails_its_decode_leg(name: str) -> None:
    says, refusal = FALSE_SOURCES[name]
    timeouts = IMPATIENT if refusal is PeerRefusal.SILENT else SETTINGS
    async with processes(decode_settings=timeouts, links=SLOW_LINKS) as pair, false_source(says) as peer:
        pair.peer = peer
        _, last = await read_all(await pair.send(Leg.DECODE, room=5))
        assert last.finish is FinishReason.ERROR
        assert pair.decode_cluster.transfer_counts().refused == {refusal: 1}
        await pair.until_idle()


async def test_invalid_listen_address_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="transfers"):
        await MockCluster().listen("127.0.0.1")
    cluster = MockCluster(transfers=SETTINGS)
    for host in ("0.0.0.0", "::", ""):
        with pytest.raises(ConfigError, match="advertise_host"):
            await cluster.listen(host)
    with pytest.raises(ConfigError, match="cannot listen"):
        await cluster.listen("192.0.2.1")
    assert cluster.transfer_counts().outgoing == 0
    peer = await cluster.listen("0.0.0.0", advertise_host="prefill.example")
    assert peer.host == "prefill.example"
    assert cluster.advertise == peer
    with pytest.raises(ConfigError, match="once"):
        await cluster.listen("127.0.0.1")
    config = MockConfig(role=Role.PREFILL, bootstrap_host="127.0.0.1", bootstrap_port=peer.port)
    with pytest.raises(ConfigError, match="bootstrap_host"):
        await start(cluster.add(config, worker_id=WorkerId(1), domains={"zone": "a"}))
    await cluster.close()


@pytest.mark.parametrize(
    "wrong",
    [
        {"token": "x" * HELLO_BYTES_MAX},
        {"connect_timeout_s": 0.0},
        {"keep_alive_s": -1.0},
        {"silence_max_s": 1.0},
        {"connections_max": 0},
    ],
)
def test_invalid_transfer_settings_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as caught:
        TransferSettings(**wrong)  # type: ignore[arg-type]
    assert caught.value.param in wrong

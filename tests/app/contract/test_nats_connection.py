"""The one connection to NATS of a process: what keeps it out at the start, and what it survives later."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvloop
from nats.aio.client import Client

from kvrouter.app import nats_connection as connection
from kvrouter.app.nats_connection import NatsUnreachable, nats_connection
from kvrouter.core.errors import ConfigError
from kvrouter.settings.planes import PlaneSettings
from tests.testing.asyncio_servers import port_of, serving_streams
from tests.testing.asyncio_transports import track_transports
from tests.testing.constants import SetConstants
from tests.testing.log_events import event_of
from tests.testing.nats_server import NatsServer
from tests.testing.processes import eventually

WITHIN_S = 30.0
HELLO = b'INFO {"server_id":"x","version":"2.14.0","max_payload":1048576,"proto":1,"headers":true}\r\n'


class _Dismissive:
    """A NATS server of sorts: it ends its first connection with an error when asked to, and takes the next;
    or lets nobody in.
    """

    def __init__(self, error: bytes, *, lets_in: bool) -> None:
        self._lets_in = lets_in
        self._error = error
        self._connections = 0
        self.dismiss = asyncio.Event()
        self.has_us_back = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        is_first = self._connections == 1
        writer.write(HELLO)
        while line := await reader.readline():
            if line.startswith(b"PING") and not self._lets_in:
                writer.write(b"-ERR '%s'\r\n" % self._error)
            elif line.startswith(b"PING"):
                writer.write(b"PONG\r\n")
                if not is_first:
                    self.has_us_back.set()
                else:
                    await self.dismiss.wait()
                    writer.write(b"-ERR '%s'\r\n" % self._error)
                    break


@asynccontextmanager
async def _dismissive(error: bytes, *, lets_in: bool = True) -> AsyncIterator[tuple[_Dismissive, str]]:
    ours = _Dismissive(error, lets_in=lets_in)
    async with serving_streams(ours.serve) as server:
        yield ours, f"nats://127.0.0.1:{port_of(server)}"


@pytest.mark.parametrize("error", [b"User Authentication Expired", b"Authorization Violation", b"Whatever"])
async def test_connection_closed_by_the_nats_server_is_retried(
    error: bytes, set_constants: SetConstants, caplog: pytest.LogCaptureFixture
) -> None:
    set_constants(connection, RECONNECT_WAIT_S=0.05)
    caplog.set_level(logging.INFO, logger="kvrouter")
    async with _dismissive(error) as (server, url):
        settings = PlaneSettings(nats_server=url)
        async with nats_connection(settings, name="test", tls=None), asyncio.timeout(WITHIN_S):
            server.dismiss.set()
            await server.has_us_back.wait()
    assert error.decode().lower() in str([vars(line) for line in caplog.records])


async def _lost_and_back(client: Client, lose: Callable[[], None], bring_back: Callable[[], None]) -> None:
    async def is_lost() -> bool:
        return not client.is_connected

    async def is_back() -> bool:
        return client.is_connected

    lose()
    await eventually(is_lost)
    bring_back()
    await eventually(is_back)


def _losses(log: pytest.LogCaptureFixture) -> list[str]:
    """Why the connection was lost, each time."""
    lost = [vars(line)["kvrouter_fields"] for line in log.records if event_of(line) == "plane_lost"]
    return [str(fields["reason"]).partition(": ")[2] for fields in lost]


async def test_a_lost_connection_is_reported_once_with_the_reason(
    own_nats: NatsServer, set_constants: SetConstants, caplog: pytest.LogCaptureFixture
) -> None:
    set_constants(connection, RECONNECT_WAIT_S=0.05)
    settings = PlaneSettings(nats_server=own_nats.url)
    async with nats_connection(settings, name="test", tls=None) as client:
        await _lost_and_back(client, own_nats.kill, own_nats.start)
    assert "it closed the connection" in _losses(caplog)
    assert "unexpected EOF" not in str([vars(line) for line in caplog.records])


async def test_unresponsive_nats_server_is_reported_with_the_time_waited(
    own_nats: NatsServer, set_constants: SetConstants, caplog: pytest.LogCaptureFixture
) -> None:
    set_constants(connection, PING_S=0.1, RECONNECT_WAIT_S=0.05)
    settings = PlaneSettings(nats_server=own_nats.url)
    async with nats_connection(settings, name="test", tls=None) as client:
        await _lost_and_back(client, own_nats.pause, own_nats.resume)
    assert "it did not answer for 0.2 s" in _losses(caplog)


@pytest.mark.parametrize("n_pongs", [pytest.param(0, id="connecting"), pytest.param(1, id="flushing")])
async def test_a_cancelled_connection_is_not_left_open(n_pongs: int) -> None:
    came = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HELLO)
        for _ in range(n_pongs):
            await reader.readuntil(b"PING\r\n")
            writer.write(b"PONG\r\n")
        await reader.readuntil(b"PING\r\n")
        came.set()
        await reader.read()

    async def use(url: str) -> None:
        async with nats_connection(PlaneSettings(nats_server=url), name="test", tls=None):
            pass

    with track_transports() as transports:
        async with serving_streams(silent) as server:
            using = asyncio.create_task(use(f"nats://127.0.0.1:{port_of(server)}"))
            async with asyncio.timeout(60.0):
                await came.wait()
                using.cancel()
                await asyncio.wait([using])
            assert using.cancelled()
            await transports.until_ended(limit_s=1.0)


async def test_refused_nats_connection_is_reported_with_the_reason(set_constants: SetConstants) -> None:
    set_constants(connection, CONNECT_LIMIT_S=1.0)
    async with _dismissive(b"Authorization Violation", lets_in=False) as (_, url):
        with pytest.raises(NatsUnreachable, match="Authorization Violation"):
            async with nats_connection(PlaneSettings(nats_server=url), name="test", tls=None):
                pass
    with pytest.raises(NatsUnreachable, match="Connect call failed"):
        async with nats_connection(PlaneSettings(nats_server=url), name="test", tls=None):
            pass


async def test_invalid_nats_address_is_named() -> None:
    settings = PlaneSettings(nats_server="127.0.0.1:99999")
    with pytest.raises(NatsUnreachable, match=r"99999.*invalid"):
        async with nats_connection(settings, name="test", tls=None):
            pass


@pytest.mark.parametrize(
    ("text", "why"), [(None, r"user\.creds: is not there$"), (b"certificate", "no user JWT")]
)
async def test_credentials_that_cannot_be_read_are_named(
    tmp_path: Path, text: bytes | None, why: str
) -> None:
    path = tmp_path / "user.creds"
    if text is not None:
        path.write_bytes(text)
    with pytest.raises(ConfigError, match=why) as caught:
        async with nats_connection(PlaneSettings(nats_credentials=str(path)), name="test", tls=None):
            pass
    assert caught.value.param == "nats_credentials"


def test_process_exits_cleanly_while_its_nats_server_is_away(
    own_nats: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="kvrouter")

    async def was_refused() -> bool:
        return "plane_disturbed" in caplog.text

    async def life() -> None:
        async with nats_connection(PlaneSettings(nats_server=own_nats.url), name="test", tls=None) as client:
            own_nats.kill()
            await eventually(was_refused, limit_s=WITHIN_S)
            await client.publish("anything", b"what is said now waits for a connection")

    uvloop.run(life())

"""The NATS connection of a process: connects, logs losses, and reconnects for ever."""

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.errors import StaleConnectionError, UnexpectedEOF
from nats.protocol.parser import PERMISSIONS_ERR, STALE_CONNECTION
from pydantic import SecretStr

from kvrouter.core.errors import ConfigError, KvrouterError
from kvrouter.core.secret import SECRET_MAX_BYTES, secret_bytes
from kvrouter.settings.planes import PlaneSettings
from kvrouter.telemetry import Event, log_event
from kvrouter.telemetry.logs import LogThrottle
from kvrouter.transports.nats_client import CLIENT_ERRORS, reason

CONNECT_LIMIT_S = 10.0
RECONNECT_WAIT_S = 1
PING_S = 2
PINGS_UNANSWERED_MAX = 2
"""A server that disappeared without closing its connection is noticed after about three pings."""

KIND_CHARS = 40
"""Errors with the same first characters are throttled as one: the rest names a subject or a subscription."""

FLUSH_S = 1
"""Seconds that the last messages of a process may take to be sent."""

_log = logging.getLogger("kvrouter.nats")


class NatsUnreachable(KvrouterError):
    """No NATS server at the configured addresses accepts the connection."""

    code = "nats_unreachable"


def revealed(secret: SecretStr | None) -> str | None:
    """The text of a secret; None where it is not set."""
    return None if secret is None else secret.get_secret_value()


def nameable(servers: str) -> str:
    """The addresses without the users and passwords that they may contain."""
    return ",".join(server.rsplit("@", 1)[-1].strip() for server in servers.split(","))


class _StayingClient(Client):
    """A NATS client that reconnects after any error of the server.

    The base client gives up for ever, and silently, when a server ends a connection with an error: expired or
    changed credentials, too many connections, a draining server.
    """

    why_lost = ""
    """Why the last connection ended."""

    async def _process_err(self, err_msg: str) -> None:
        if STALE_CONNECTION in err_msg or PERMISSIONS_ERR in err_msg.lower():
            await super()._process_err(err_msg)
            return
        error = NatsError(f"nats: {err_msg.strip(chr(39))}")
        if not self.is_connected:
            await self._error_cb(error)
        await self._process_op_err(error)

    async def _select_next_server(self) -> None:
        if self._transport is not None:  # a refused login leaves its connection open
            self._transport.close()  # type: ignore[no-untyped-call]
        await super()._select_next_server()

    async def _close(self, status: int, do_cbs: bool = True) -> None:
        if not self.is_connected:  # pending messages would be written to a closed connection
            self._pending, self._pending_data_size = [], 0
        await super()._close(status, do_cbs)

    async def _process_op_err(self, e: Exception) -> None:
        if self.is_connected:
            self.why_lost = _why_lost(e)
        await super()._process_op_err(e)


def _why_lost(error: Exception) -> str:
    if isinstance(error, UnexpectedEOF):
        return "it closed the connection"
    if isinstance(error, StaleConnectionError):
        return f"it did not answer for {PING_S * PINGS_UNANSWERED_MAX} s"
    return reason(error)


class _ConnectionWatch:
    """Logs the states of a connection. ``needed_for`` is appended to the lines before it is open."""

    def __init__(self, client: _StayingClient, servers: str, needed_for: str) -> None:
        self.servers = servers
        self.needed_for = needed_for
        self.is_open = False
        self.reasons: dict[str, None] = {}
        """Why no server accepted the connection, in the order of discovery."""
        self._client = client
        self._throttle = LogThrottle()

    async def lost(self) -> None:
        """Log the loss of the connection; the client reconnects."""
        if not self._client.is_closed:
            log_event(_log, Event.PLANE_LOST, plane="nats", reason=f"{self.servers}: {self._client.why_lost}")

    async def back(self) -> None:
        """Log the restored connection."""
        log_event(_log, Event.PLANE_BACK, plane="nats", reason=self.servers)

    async def trouble(self, error: Exception) -> None:
        """Log a connection's error at a limited rate; errors of one message are raised to its sender."""
        if isinstance(error, UnexpectedEOF):
            return  # lost() logs a lost connection
        why = reason(error)
        text = f"{self.servers}: {why}"
        if not self.is_open:
            if why not in self.reasons:
                log_event(_log, Event.PLANE_AWAITED, plane="nats", reason=f"{text}{self.needed_for}")
            self.reasons[why] = None
        elif self._throttle.allows(why[:KIND_CHARS]):
            log_event(_log, Event.PLANE_DISTURBED, plane="nats", reason=text)


@asynccontextmanager
async def nats_connection(
    settings: PlaneSettings, *, name: str, tls: ssl.SSLContext | None, needs: Sequence[str] = ()
) -> AsyncIterator[Client]:
    """Connect, and reconnect for ever after a loss.

    ``needs`` lists the features that need NATS: while connecting, an unreachable server is logged at once
    with them.

    Raises NatsUnreachable when no server accepts the connection at the start, ConfigError for unreadable
    credentials.
    """
    _check_credentials(settings.nats_credentials)
    client = _StayingClient()
    watch = _ConnectionWatch(
        client, nameable(settings.nats_server), f"; needed for {', '.join(needs)}" if needs else ""
    )
    try:
        async with asyncio.timeout(CONNECT_LIMIT_S):
            try:
                await client.connect(
                    servers=[server.strip() for server in settings.nats_server.split(",")],
                    name=name,
                    user=settings.nats_username,
                    password=revealed(settings.nats_password),
                    token=revealed(settings.nats_token),
                    user_credentials=settings.nats_credentials,
                    tls=tls,
                    error_cb=watch.trouble,
                    disconnected_cb=watch.lost,
                    reconnected_cb=watch.back,
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=RECONNECT_WAIT_S,
                    ping_interval=PING_S,
                    max_outstanding_pings=PINGS_UNANSWERED_MAX,
                )
            except asyncio.CancelledError:  # also at the limit; after other errors connect() has closed it
                with suppress(OSError):
                    await client.close()
                raise
    except CLIENT_ERRORS as error:
        why = "; ".join(watch.reasons) or reason(error)
        raise NatsUnreachable(
            f"no NATS server lets us in at {watch.servers} ({why}){watch.needed_for}: start one, set "
            "NATS_SERVER and NATS_AUTH_*, or choose --discovery file"
        ) from error
    watch.is_open = True
    try:
        yield client
    finally:
        try:
            if client.is_connected:
                await client.flush(timeout=FLUSH_S)
        except CLIENT_ERRORS:
            log_event(_log, Event.PLANE_LOST, plane="nats", reason="the last messages may be lost")
        finally:
            with suppress(OSError):  # the server may be gone
                await client.close()


def _check_credentials(path: str | None) -> None:
    """Check that a credentials file is readable and complete. Raises ConfigError."""
    if path is None:
        return
    text = secret_bytes(Path(path), "planes.nats_credentials", max_bytes=SECRET_MAX_BYTES)
    if b"BEGIN NATS USER JWT" not in text or b"BEGIN USER NKEY SEED" not in text:
        raise ConfigError(
            f"planes.nats_credentials: {path} holds no user JWT and seed of NATS", param="nats_credentials"
        )

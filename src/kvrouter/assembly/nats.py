"""The one connection to NATS of a process."""

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from nats.aio.client import Client
from nats.errors import Error as NatsError
from pydantic import SecretStr

from kvrouter.config import PlaneSettings
from kvrouter.core.errors import KvrouterError
from kvrouter.telemetry import Event, log_event

CONNECT_LIMIT_S = 10.0
RECONNECT_WAIT_S = 1
PING_S = 2
PINGS_UNANSWERED_MAX = 2
"""A server that vanished without a word is noticed after about three pings."""

FLUSH_S = 1
"""How long the last words of a process may take to leave."""

_log = logging.getLogger("kvrouter.nats")


class NatsUnreachable(KvrouterError):
    """No NATS server answers at the address of the settings."""

    code = "nats_unreachable"


def revealed(secret: SecretStr | None) -> str | None:
    """The text of a secret that is set."""
    return None if secret is None else secret.get_secret_value()


def nameable(servers: str) -> str:
    """The addresses without the users and passwords that may stand in them."""
    return ",".join(server.rsplit("@", 1)[-1].strip() for server in servers.split(","))


@asynccontextmanager
async def nats_connection(
    settings: PlaneSettings, *, name: str, tls: ssl.SSLContext | None
) -> AsyncIterator[Client]:
    """Connect, and stay connected: a connection that is lost is tried again for ever.

    Raises NatsUnreachable when there is no server at the start.
    """
    client = Client()
    servers = nameable(settings.nats_server)

    async def lost() -> None:
        if not client.is_closed:
            log_event(_log, Event.PLANE_LOST, plane="nats", reason=servers)

    async def back() -> None:
        log_event(_log, Event.PLANE_BACK, plane="nats", reason=servers)

    async def ignore(_error: Exception) -> None:
        """What goes wrong with one message is told where it is awaited; a lost connection by ``lost``."""

    try:
        async with asyncio.timeout(CONNECT_LIMIT_S):
            await client.connect(
                servers=[server.strip() for server in settings.nats_server.split(",")],
                name=name,
                user=settings.nats_username,
                password=revealed(settings.nats_password),
                token=revealed(settings.nats_token),
                user_credentials=settings.nats_credentials,
                tls=tls,
                error_cb=ignore,
                disconnected_cb=lost,
                reconnected_cb=back,
                max_reconnect_attempts=-1,
                reconnect_time_wait=RECONNECT_WAIT_S,
                ping_interval=PING_S,
                max_outstanding_pings=PINGS_UNANSWERED_MAX,
            )
    except (NatsError, OSError, TimeoutError) as error:
        raise NatsUnreachable(
            f"no NATS server answers at {servers} ({str(error) or type(error).__name__}): start one, set "
            "NATS_SERVER, or choose --discovery file"
        ) from error
    try:
        yield client
    finally:
        if client.is_connected:
            try:
                await client.flush(timeout=FLUSH_S)
            except (NatsError, OSError, TimeoutError):
                log_event(_log, Event.PLANE_LOST, plane="nats", reason="the last messages may be lost")
        with suppress(OSError):  # the server may be gone
            await client.close()

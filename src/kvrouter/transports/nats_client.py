"""Shared helpers for NATS: names in subjects, flush, unsubscribe, errors and their messages.

When the client's own ``flush`` is cancelled, it leaves a cancelled future for the server's answer. That
answer ends the client's reading, and the connection receives nothing until it is found to be stale.
"""

import asyncio
import re
from contextlib import suppress

from nats.aio.client import Client
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError
from nats.js.errors import APIError, ServiceUnavailableError

CLIENT_ERRORS = (NatsError, OSError)
"""Errors of NATS calls: the client's and the socket's; a timeout is among both."""

STREAM_EXISTS = 10058
"""The server's code for a stream of that name with another configuration."""

_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9_-]")


def subject_name(name: str) -> str:
    """Return ``name`` as one token of a subject; characters with a meaning in subjects become ``_``."""
    return _NOT_IN_A_NAME.sub("_", name)


async def flush(client: Client) -> None:
    """Return once the server has handled all sent messages; raise what the client's ``flush`` raises.

    A cancelled flush continues in the background.
    """
    await asyncio.shield(asyncio.create_task(client.flush()))


async def flush_subscriptions(client: Client) -> None:
    """Return once the server knows every subscription; raise what the client's ``flush`` raises."""
    for _ in range(2):  # the client's first ping may overtake a subscription; the second cannot
        await flush(client)


async def unsubscribe(subscribing: asyncio.Task[Subscription]) -> None:
    """End a subscription. Where the connection is gone, so is the subscription."""
    with suppress(*CLIENT_ERRORS):
        await (await subscribing).unsubscribe()


NO_JETSTREAM = "this NATS server has no JetStream: start nats-server with -js"
NO_ANSWER = "NATS did not answer in time"
NO_ROOM = "JetStream has no room for it: free its disk, or give it more (max_file_store)"

_NO_ROOM_CODES = frozenset({10002, 10023, 10047})
"""The server's codes for too little storage: of an account, of the cluster, of the server."""


def reason(error: BaseException) -> str:
    """Return ``error`` as one line; replace messages of the client that are empty or do not help."""
    if isinstance(error, ServiceUnavailableError) and error.code is None:
        # Raised by the client when JetStream has no responder; an error of the server has a code.
        return NO_JETSTREAM
    if isinstance(error, APIError) and error.description:
        if error.err_code in _NO_ROOM_CODES:
            return f"{NO_ROOM} ({error.description})"
        return f"{error.description} (NATS error {error.err_code})"
    if isinstance(error, TimeoutError) and str(error) in ("", "nats: timeout"):
        return NO_ANSWER
    return str(error) or type(error).__name__

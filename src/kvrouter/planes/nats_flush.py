"""Flushing a NATS connection in a way that may be cancelled.

The client's own ``flush``, when it is cancelled, leaves a cancelled future for the server's answer. The
answer ends the client's reading, and the connection receives nothing until it is found to be stale.
"""

import asyncio

from nats.aio.client import Client


async def flush(client: Client) -> None:
    """Return once the server has handled what was sent; raises what the client's ``flush`` does.

    One that is cancelled goes on in the background.
    """
    await asyncio.shield(asyncio.create_task(client.flush()))


async def flush_subscriptions(client: Client) -> None:
    """Return once the server knows every subscription; raises what the client's ``flush`` does."""
    for _ in range(2):  # the client's first ping may overtake a subscription; the second cannot
        await flush(client)

"""Whoever gives up waiting for a flush leaves a connection that goes on receiving."""

import asyncio

import nats
import pytest

from kvrouter.transports.nats_client import flush, flush_subscriptions
from tests.testing.nats_server import NatsServer
from tests.testing.waits import LIMIT_S


@pytest.mark.parametrize("turns", range(4))
async def test_a_connection_receives_after_a_flush_was_cancelled(shared_nats: NatsServer, turns: int) -> None:
    client = await nats.connect(shared_nats.url)
    flushing = asyncio.create_task(flush(client))
    for _ in range(turns):
        await asyncio.sleep(0)
    flushing.cancel()
    await asyncio.wait({flushing})
    subscription = await client.subscribe(client.new_inbox())
    await flush_subscriptions(client)
    await client.publish(subscription.subject, b"here")
    assert (await subscription.next_msg(timeout=LIMIT_S)).data == b"here"
    await client.close()

"""How much of a long stream waits inside a router that reads it."""

import asyncio
import uuid

import nats
import pytest

from kvrouter.transports.events.jetstream.consumer import HEARTBEAT_S, UNACKED_MAX, PushConsumer
from tests.testing.nats_server import NatsServer

MESSAGES = 8 * UNACKED_MAX


@pytest.mark.parametrize("durable", [None, "a-router"])
async def test_waiting_messages_are_limited_by_the_unacknowledged_maximum(
    shared_nats: NatsServer, durable: str | None
) -> None:
    client = await nats.connect(shared_nats.url)
    stream = f"backlog-{uuid.uuid4().hex}"
    jetstream = client.jetstream()
    await jetstream.add_stream(name=stream, subjects=[f"{stream}.>"])
    for number in range(MESSAGES):
        await client.publish(f"{stream}.rank", b"%d" % number)
    await client.flush()
    payloads: list[bytes] = []
    waiting: list[int] = []
    complete = asyncio.Event()

    def on_message(_subject: str, payload: bytes, _sequence: int, _pending: int) -> None:
        payloads.append(payload)
        assert delivery._subscription is not None
        waiting.append(delivery._subscription.pending_msgs)
        if len(payloads) == MESSAGES:
            complete.set()

    delivery = PushConsumer(
        client,
        jetstream,
        on_message,
        stream=stream,
        subjects=f"{stream}.>",
        heartbeat_s=HEARTBEAT_S,
        durable=durable,
    )
    try:
        await delivery.open(after=0)
        await complete.wait()
    finally:
        await delivery.close()
        await jetstream.delete_stream(stream)
        await client.close()
    assert payloads == [b"%d" % number for number in range(MESSAGES)]
    assert max(waiting) <= UNACKED_MAX

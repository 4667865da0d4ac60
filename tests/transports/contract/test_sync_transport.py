"""What every sync plane does: to all, to one, in order, never waiting; and what NATS refuses."""

import asyncio
from uuid import uuid4

import nats
from nats.aio.msg import Msg

from kvrouter.core.ids import DpRank, Epoch, ModelName, RequestId, RouterId, WorkerId, WorkerRank
from kvrouter.core.replica_messages import (
    NAMED_BLOCKS_MAX,
    AddRequest,
    Deltas,
    Free,
    Goodbye,
    Heartbeat,
    LeaseName,
    LinkName,
    LinkSample,
    LinkUpdate,
    LinkUse,
    MarkPrefillCompleted,
    OutputBlocks,
    StatePart,
    StateQuestion,
    SyncMessage,
)
from kvrouter.transports.sync.nats import NatsSyncTransport
from tests.testing.cancellation import cancelled_at_each_await
from tests.testing.nats_server import NatsServer, running_nats
from tests.testing.sync_transports import MakeTransport, make_transport

__all__ = ["make_transport"]  # the fixture

A, B, C = RouterId("router-a"), RouterId("router-b"), RouterId("router-c")
WITHIN_S = 60.0
LINK = LinkName((("zone", "a"), ("rack", None)), "b")


class Ear:
    """What one router heard from others."""

    def __init__(self, router_id: RouterId) -> None:
        self.heard: list[SyncMessage] = []
        self._router_id = router_id
        self._more = asyncio.Event()

    def __call__(self, message: SyncMessage) -> None:
        if message.router_id != self._router_id:
            self.heard.append(message)
            self._more.set()

    async def wait_for(self, n_messages: int) -> list[SyncMessage]:
        async with asyncio.timeout(WITHIN_S):
            while len(self.heard) < n_messages:
                self._more.clear()
                await self._more.wait()
        return self.heard


def add(request: str = "r", *, n_blocks: int = 2) -> AddRequest:
    return AddRequest(
        model=ModelName("m"),
        request_id=RequestId(request),
        leg_number=1,
        rank=WorkerRank(WorkerId(2**63 - 1), DpRank(3)),
        incarnation=Epoch(2**64 - 1),
        isl_tokens=16 * n_blocks + 1,
        block_hashes=bytes(range(8)) * n_blocks,
        prefill_tokens=17,
        track_blocks=True,
    )


NAME = LeaseName(ModelName("m"), RequestId("r"), 1)
MESSAGES: list[SyncMessage] = [
    StateQuestion(A),
    Deltas(A, 1, (add(), MarkPrefillCompleted(NAME), OutputBlocks(NAME, 7), Free(NAME))),
    Heartbeat(A, 1, 0),
    StatePart(A, 1, 0, 2, (add(),)),
    StatePart(A, 1, 1, 2, ()),
    Goodbye(A),
    LinkUpdate(
        A,
        ModelName("m"),
        "digest",
        (LinkSample(B, 7, LINK, 1e-3, 1e9, 0.5, 0.1, 1.0), LinkSample(A, 0, None, 0.0, 1.0, 0.0, 0.0, 0.0)),
        (LinkUse(LINK, 1e9, 2.5, 5e8, 0.5),),
    ),
    LinkUpdate(A, ModelName("m"), "digest"),
]


async def test_every_message_reaches_the_other_routers_in_order(make_transport: MakeTransport) -> None:
    a, b, c = [await make_transport() for _ in range(3)]
    ears = [Ear(router_id) for router_id in (A, B, C)]
    ends = [
        await transport.subscribe(r, ear)
        for transport, r, ear in zip((a, b, c), (A, B, C), ears, strict=True)
    ]
    for message in MESSAGES:
        assert a.publish(message)
    for ear in ears[1:]:
        assert await ear.wait_for(len(MESSAGES)) == MESSAGES
    assert ears[0].heard == []
    for end in ends:
        await end()


async def test_message_to_one_router_reaches_no_other(make_transport: MakeTransport) -> None:
    a, b, c = [await make_transport() for _ in range(3)]
    ear_b, ear_c = Ear(B), Ear(C)
    ends = [await b.subscribe(B, ear_b), await c.subscribe(C, ear_c)]
    a.publish(Heartbeat(A, 1, 0), to=B)
    a.publish(Heartbeat(A, 2, 0))
    assert len(await ear_b.wait_for(2)) == 2
    assert await ear_c.wait_for(1) == [Heartbeat(A, 2, 0)]
    for end in ends:
        await end()


async def test_message_with_the_longest_prompts_arrives(make_transport: MakeTransport) -> None:
    a, b = await make_transport(), await make_transport()
    ear = Ear(B)
    end = await b.subscribe(B, ear)
    message = Deltas(A, 1, tuple(add(str(n), n_blocks=NAMED_BLOCKS_MAX) for n in range(4)))
    assert a.publish(message)
    assert await ear.wait_for(1) == [message]
    await end()


async def test_ended_subscription_hears_nothing_and_goodbye_is_still_sent(
    make_transport: MakeTransport,
) -> None:
    a, b, c = [await make_transport() for _ in range(3)]
    ear_b, ear_c = Ear(B), Ear(C)
    end_a = await a.subscribe(A, Ear(A))
    end_b, end_c = await b.subscribe(B, ear_b), await c.subscribe(C, ear_c)
    await end_b()
    a.publish(Goodbye(A))
    await end_a()
    assert await ear_c.wait_for(1) == [Goodbye(A)]
    assert ear_b.heard == []
    await end_c()


async def test_a_subscription_that_is_cancelled_midway_hears_nothing(make_transport: MakeTransport) -> None:
    a, b = await make_transport(), await make_transport()
    cancelled, ear = Ear(B), Ear(B)
    async for end in cancelled_at_each_await(lambda: b.subscribe(B, cancelled)):
        if end is not None:
            await end()
    end = await b.subscribe(B, ear)
    a.publish(Goodbye(A))
    assert await ear.wait_for(1) == [Goodbye(A)], "the connection receives"
    assert cancelled.heard == []
    await end()


async def test_forged_or_malformed_nats_messages_are_refused(shared_nats: NatsServer) -> None:
    client = await nats.connect(shared_nats.url)
    namespace = f"ns-{uuid4().hex}"
    refused: list[str] = []
    ours = NatsSyncTransport(client, namespace=namespace, token="secret", on_refused=refused.append)
    ear = Ear(B)
    end = await ours.subscribe(B, ear)
    subject = f"kvrouter.{namespace}.sync.v1.all.router-a"
    NatsSyncTransport(client, namespace=namespace, token="guess").publish(Heartbeat(A, 1, 0))
    await asyncio.sleep(0)
    await client.publish(subject, b"")
    await client.publish(subject, b"x" * 100)
    friend = NatsSyncTransport(client, namespace=namespace, token="secret")
    await client.publish(subject, friend._auth.seal(subject, b"\xc1", number=next(friend._numbers)))
    friend.publish(Goodbye(A))
    assert await ear.wait_for(1) == [Goodbye(A)]
    assert len(refused) == 4
    assert sum("token" in why for why in refused) == 3
    await end()
    await client.close()


async def test_replayed_nats_messages_are_refused(shared_nats: NatsServer) -> None:
    client, stranger = await nats.connect(shared_nats.url), await nats.connect(shared_nats.url)
    namespace = f"ns-{uuid4().hex}"
    refused: list[str] = []
    a = NatsSyncTransport(client, namespace=namespace, token="secret")
    b = NatsSyncTransport(client, namespace=namespace, token="secret", on_refused=refused.append)
    ear = Ear(B)
    overheard: list[tuple[str, bytes]] = []

    async def overhear(message: Msg) -> None:
        overheard.append((message.subject, message.data))

    await stranger.subscribe("kvrouter.>", cb=overhear)
    for _ in range(2):  # the client's first ping may overtake a subscription; the second cannot
        await stranger.flush()
    end = await b.subscribe(B, ear)
    said: list[SyncMessage] = [Deltas(A, 1, (add(),)), Heartbeat(A, 1, 1), Goodbye(A)]
    for message in said:
        a.publish(message)
    assert await ear.wait_for(3) == said
    async with asyncio.timeout(WITHIN_S):
        while len(overheard) < 3:  # noqa: ASYNC110 - nobody announces it
            await asyncio.sleep(0.01)
    for subject, frame in overheard:
        await stranger.publish(subject, frame)  # as it was said
        await stranger.publish(subject.replace(".all.", f".to.{B}."), frame)  # and to one alone
    await stranger.flush()
    a.publish(Heartbeat(A, 2, 0))
    assert await ear.wait_for(4) == [*said, Heartbeat(A, 2, 0)]
    async with asyncio.timeout(WITHIN_S):
        while len(refused) < 6:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await end()
    await client.close()
    await stranger.close()


async def test_publish_fails_when_the_nats_outbox_is_full_or_closed(shared_nats: NatsServer) -> None:
    client = await nats.connect(shared_nats.url)
    transport = NatsSyncTransport(client, namespace="ns", token="t0p", outbox_max_bytes=2_000)
    big = Deltas(A, 1, (add(n_blocks=100),))
    assert [transport.publish(big) for _ in range(3)] == [True, True, False]
    await client.close()
    assert not transport.publish(Goodbye(A))


async def test_message_over_the_broker_size_limit_is_dropped() -> None:
    with running_nats(max_payload_bytes=4_096) as server:
        client = await nats.connect(server.url)
        transport = NatsSyncTransport(client, namespace="ns", token="t0p")
        assert not transport.publish(Deltas(A, 1, (add(n_blocks=1_000),)))
        assert transport.publish(Deltas(A, 2, (add(n_blocks=10),)))
        await client.close()

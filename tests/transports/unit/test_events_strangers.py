"""KV events, loads and questions over NATS Core when somebody without the token, or who overheard, speaks."""

from collections.abc import AsyncIterator
from uuid import uuid4

import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from kvrouter.core.errors import ProtocolError
from kvrouter.core.events import Held, KvBatch, KvSnapshot, Stored, pack_hashes
from kvrouter.core.ids import DpRank, Epoch, EventId, WorkerId, WorkerRank
from kvrouter.core.workers import LoadReport
from kvrouter.transports.events.nats import NatsEventPublisher
from kvrouter.transports.events.nats_recovery import NatsRecovery
from kvrouter.transports.events.subjects import events_subject, recovery_subject
from tests.testing.event_transports import TOKEN, NatsTransport, connect, until_delivered
from tests.testing.nats_server import NatsServer
from tests.testing.waits import until

RANK = WorkerRank(WorkerId(4), DpRank(0))
OTHER = WorkerRank(WorkerId(5), DpRank(0))
EPOCH = Epoch(7)
COLUMN = pack_hashes([1])
UNANSWERED_S = 0.3


def batch(first: int) -> KvBatch:
    return KvBatch(RANK, EPOCH, EventId(first), (Stored(None, COLUMN, COLUMN),))


def load(active_blocks: int) -> LoadReport:
    return LoadReport(RANK, active_blocks=active_blocks, total_blocks=100)


class Answers:
    """Answers for a worker, and counts."""

    def __init__(self) -> None:
        self.n_asked = 0

    def recover_range(self, rank: WorkerRank, first: EventId, last: EventId) -> KvBatch | None:
        self.n_asked += 1
        return batch(first)

    def recover_snapshot(self, rank: WorkerRank) -> KvSnapshot | None:
        self.n_asked += 1
        return KvSnapshot(rank, EPOCH, EventId(self.n_asked), (Held(COLUMN, COLUMN),))


class Stranger:
    """Somebody else on the same NATS server: he hears everything, and may say what he likes."""

    def __init__(self, client: Client, namespace: str) -> None:
        self.client = client
        self.namespace = namespace
        self.overheard: list[tuple[str, str, bytes]] = []

    async def listen(self, subject: str) -> None:
        async def overhear(message: Msg) -> None:
            self.overheard.append((message.subject, message.reply, message.data))

        await self.client.subscribe(subject, cb=overhear)
        for _ in range(2):  # the client's first ping may overtake a subscription; the second cannot
            await self.client.flush()

    def of(self, word: str) -> list[tuple[str, str, bytes]]:
        return [heard for heard in self.overheard if word in heard[0].split(".")]


class Scene:
    def __init__(self, transport: NatsTransport, stranger: Stranger) -> None:
        self.ends = transport
        self.stranger = stranger
        self.batches: list[KvBatch] = []
        self.loads: list[LoadReport] = []
        transport.subscriber.subscribe(self.batches.append, self.loads.append)

    async def until_next(self, event_id: int) -> None:
        """What the worker says now is heard, and so is all that came before."""
        self.ends.publisher.publish(batch(event_id))
        await until(lambda: batch(event_id) in self.batches)


@pytest.fixture
async def scene(shared_nats: NatsServer) -> AsyncIterator[Scene]:
    clients = [await connect(shared_nats.url) for _ in range(3)]
    namespace = f"test-{uuid4().hex}"
    transport = NatsTransport(clients[0], clients[1], namespace)
    await transport.subscriber.start()
    await until_delivered(transport.publisher, transport.subscriber, RANK.worker_id)
    yield Scene(transport, Stranger(clients[2], namespace))
    await transport.close()
    for client in clients:
        await client.close()


@pytest.mark.parametrize("token", ["guess", ""])
async def test_events_and_loads_with_a_wrong_token_are_refused(scene: Scene, token: str) -> None:
    forger = NatsEventPublisher(
        scene.stranger.client, namespace=scene.stranger.namespace, component="backend", token=token
    )
    forger.publish(batch(0))
    forger.publish_load(load(99))
    await until(lambda: len(scene.ends.malformed) == 2)
    await scene.until_next(1)
    assert (scene.batches, scene.loads) == ([batch(1)], [])
    assert all("KVROUTER_PLANE_TOKEN" in why for why in scene.ends.malformed)
    await forger.close()


async def test_event_replayed_on_the_subject_of_another_rank_is_refused(scene: Scene) -> None:
    await scene.stranger.listen(f"kvrouter.{scene.stranger.namespace}.>")
    await scene.until_next(1)
    await until(lambda: bool(scene.stranger.of("events")))
    _, _, message = scene.stranger.of("events")[0]
    subject = events_subject(scene.stranger.namespace, "backend", OTHER)
    await scene.stranger.client.publish(subject, message)
    await until(lambda: len(scene.ends.malformed) == 1)
    await scene.until_next(2)
    assert scene.batches == [batch(1), batch(2)]


async def test_replayed_load_reports_are_ignored(scene: Scene) -> None:
    await scene.stranger.listen(f"kvrouter.{scene.stranger.namespace}.>")
    for active_blocks in (90, 10):
        scene.ends.publisher.publish_load(load(active_blocks))
        await until(lambda here=active_blocks: load(here) in scene.loads)  # type: ignore[misc]
    await until(lambda: len(scene.stranger.of("loads")) == 2)
    for subject, _, message in scene.stranger.of("loads"):
        await scene.stranger.client.publish(subject, message)
    await scene.stranger.client.flush()
    scene.ends.publisher.publish_load(load(11))
    await until(lambda: load(11) in scene.loads)
    assert scene.loads == [load(90), load(10), load(11)]


async def test_load_report_of_a_restarted_worker_arrives(scene: Scene) -> None:
    scene.ends.publisher.publish_load(load(1))
    await until(lambda: load(1) in scene.loads)
    again = NatsTransport(scene.ends.worker, scene.ends.router, scene.ends.namespace)
    again.publisher.publish_load(load(2))
    await until(lambda: load(2) in scene.loads)
    await again.close()


async def test_recovery_question_with_a_wrong_token_is_not_answered(scene: Scene) -> None:
    answers = Answers()
    scene.ends.serve_recovery(RANK.worker_id, answers)
    assert await scene.ends.subscriber.recover_snapshot(RANK) is not None
    asker = NatsRecovery(
        scene.stranger.client,
        namespace=scene.stranger.namespace,
        token="guess",
        on_malformed=lambda _why: None,
        answer_timeout_s=UNANSWERED_S,
    )
    assert await asker.recover_snapshot(RANK) is None
    assert await asker.recover_range(RANK, EventId(0), EventId(3)) is None
    assert answers.n_asked == 1
    assert len(scene.ends.malformed) >= 2
    await asker.close()


async def test_replayed_recovery_question_is_refused(scene: Scene) -> None:
    answers = Answers()
    scene.ends.serve_recovery(RANK.worker_id, answers)
    assert await scene.ends.subscriber.recover_snapshot(RANK) is not None
    await scene.stranger.listen(f"kvrouter.{scene.stranger.namespace}.recovery.*")
    assert await scene.ends.subscriber.recover_snapshot(RANK) is not None
    await until(lambda: len(scene.stranger.overheard) == 1)
    subject, reply, message = scene.stranger.overheard[0]
    await scene.stranger.client.publish(subject, message, reply=reply)
    await until(lambda: scene.ends.malformed == ["a router's question came again"])
    assert answers.n_asked == 2


async def test_peer_with_a_wrong_token_cannot_answer_recovery(scene: Scene) -> None:
    unread: list[str] = []
    forger = NatsRecovery(
        scene.stranger.client, namespace=scene.stranger.namespace, token="guess", on_malformed=unread.append
    )
    forger.serve_recovery(OTHER.worker_id, Answers())
    await scene.stranger.client.flush()
    impatient = NatsRecovery(
        scene.ends.router,
        namespace=scene.stranger.namespace,
        token=TOKEN,
        on_malformed=lambda _why: None,
        answer_timeout_s=UNANSWERED_S,
    )
    assert await impatient.recover_snapshot(OTHER) is None, "he cannot even open the question"
    assert unread
    await forger.close()


async def test_replayed_answer_to_an_earlier_question_is_refused(scene: Scene) -> None:
    """The stranger answers with what the worker itself said a while ago."""
    end = scene.ends.serve_recovery(RANK.worker_id, Answers())
    await scene.stranger.listen("_INBOX.>")
    assert await scene.ends.subscriber.recover_snapshot(RANK) is not None
    await until(lambda: bool(scene.stranger.overheard))
    old = scene.stranger.overheard[0][2]
    end()
    await scene.ends.worker.flush()

    async def answer(message: Msg) -> None:
        await message.respond(old)

    subject = recovery_subject(scene.stranger.namespace, RANK.worker_id)
    await scene.stranger.client.subscribe(subject, cb=answer)
    await scene.stranger.client.flush()
    with pytest.raises(ProtocolError):
        await scene.ends.subscriber.recover_snapshot(RANK)
    assert "KVROUTER_PLANE_TOKEN" in scene.ends.malformed[-1]

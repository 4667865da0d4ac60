"""The worker processes' side of the recovery benchmark: one process with every worker rank of the fleet."""

import asyncio
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import NamedTuple

import nats

from benchmarks.workload import random_hashes
from kvrouter.app.telemetry_hooks import StreamHooks
from kvrouter.core.events import Stored, unpack_hashes
from kvrouter.core.ids import DpRank, EngineHash, Epoch, WorkerId
from kvrouter.core.workers import EventSource
from kvrouter.transports.events.jetstream import JetStreamPublisher
from kvrouter.transports.events.nats_recovery import NatsRecovery
from kvrouter.transports.events.zmq import ZmqEventPublisher
from kvrouter.worker import KvPublisher

RUN_BLOCKS = 125

EVENT_BLOCKS = 25
"""Blocks that an engine stores at once."""

EPOCH = Epoch(1)
NAMESPACE = "bench"
TOKEN = "bench"
COMPONENT = "backend"
RANK = DpRank(0)


class Fleet(NamedTuple):
    """So many worker ranks, each with so many sequences of ``RUN_BLOCKS`` blocks that nobody else holds."""

    workers: int
    runs: int

    @property
    def blocks(self) -> int:
        """Blocks of all ranks."""
        return self.workers * self.runs * RUN_BLOCKS

    @property
    def worker_ids(self) -> list[WorkerId]:
        """The ids of the workers, of one rank each."""
        return [WorkerId(number) for number in range(1, self.workers + 1)]


class Sources(NamedTuple):
    """What the workers' cards say for each event transport."""

    jetstream: EventSource
    zmq: EventSource


def fail(why: object) -> None:
    raise SystemExit(f"a frame could not be read: {why}")


def stored(worker_id: WorkerId, run: int) -> Iterator[Stored]:
    """The events of one sequence of ``RUN_BLOCKS`` blocks, under names that are nobody else's."""
    seed = (worker_id << 32) + run
    names, own = random_hashes(2 * seed, RUN_BLOCKS), random_hashes(2 * seed + 1, RUN_BLOCKS)
    parent: EngineHash | None = None
    for first in range(0, 8 * RUN_BLOCKS, 8 * EVENT_BLOCKS):
        part = slice(first, first + 8 * EVENT_BLOCKS)
        yield Stored(parent, names[part], own[part])
        parent = EngineHash(unpack_hashes(names[part])[-1])


def serve(url: str, pipe: Connection, fleet: Fleet) -> None:
    """Publish the fleet's blocks, say so, and answer questions until the other end is done."""
    asyncio.run(_serve(url, pipe, fleet))


async def _serve(url: str, pipe: Connection, fleet: Fleet) -> None:
    client = await nats.connect(url)
    stream = JetStreamPublisher(
        client,
        namespace=NAMESPACE,
        component=COMPONENT,
        token=TOKEN,
        observer=StreamHooks(),
    )
    over_nats = NatsRecovery(client, namespace=NAMESPACE, token=TOKEN, on_malformed=fail)
    over_zmq = ZmqEventPublisher("127.0.0.1", on_malformed=fail)
    publishers = []
    for worker_id in fleet.worker_ids:
        publisher = KvPublisher(stream, worker_id=worker_id, epoch=EPOCH, block_size=64)
        for server in (over_nats, over_zmq):
            server.serve_recovery(worker_id, publisher)
        publishers.append(publisher)
    for run in range(fleet.runs):
        for worker_id, publisher in zip(fleet.worker_ids, publishers, strict=True):
            for event in stored(worker_id, run):
                publisher.publish(RANK, (event,))
        await asyncio.sleep(0)  # a step of each engine is a batch
        while not stream.is_idle:  # noqa: ASYNC110 - it publishes no faster than the broker takes
            await asyncio.sleep(0.001)
    pipe.send(Sources(stream.source, over_zmq.source))
    await asyncio.to_thread(pipe.recv)
    await stream.close()
    await over_zmq.close()
    await client.close()

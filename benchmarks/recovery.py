"""``python -m benchmarks.recovery``: how long a router that starts needs to know a million blocks.

Sixteen worker ranks of another process hold them. A router begins with an empty index: from a snapshot and
the stream that follows it, from the stream alone, or by asking every worker's local indexer, over NATS and
over zmq. Each time ends when every feed is live and the index holds every block.
"""

import asyncio
import os
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.metadata import version
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import NamedTuple

import click
import nats

from benchmarks.event_lanes import nats_server
from benchmarks.recovery_worker import (
    BLOCKS,
    COMPONENT,
    EPOCH,
    NAMESPACE,
    RANK,
    Sources,
    fail,
    serve,
    worker_ids,
)
from benchmarks.report import open_console, report
from benchmarks.results import Line, measured
from kvrouter.core.ids import ModelName, Slot, WorkerRank
from kvrouter.core.workers import EventLane, EventSource, Role, WorkerCard
from kvrouter.feed.words import FeedState
from kvrouter.index.native import BlockIndex
from kvrouter.planes.events.jetstream import JetStreamSubscriber
from kvrouter.planes.events.nats import NatsEventSubscriber
from kvrouter.planes.events.nats_recovery import NatsRecovery
from kvrouter.planes.events.port import EventSubscriber
from kvrouter.planes.events.zmq import ZmqEventSubscriber
from kvrouter.service.cache_view import EventCacheView
from kvrouter.service.event_pump import EventPump
from kvrouter.service.index_snapshots import IndexSnapshots
from kvrouter.service.observed import ModelObserved
from kvrouter.telemetry import Telemetry

ROUNDS = 5
LIMIT_S = 120.0
MS = 1000.0


class Took(NamedTuple):
    """Seconds of the clock, and of this process's processor time."""

    clock_s: float
    cpu_s: float


class Router:
    """A router's index and feeds, empty at first."""

    def __init__(self, subscriber: EventSubscriber) -> None:
        self.index = BlockIndex()
        self.subscriber = subscriber
        self.pump = EventPump(self.index, subscriber, ModelObserved(Telemetry(), "m"))
        subscriber.subscribe(self.pump.on_batch, lambda _report: None)

    async def learn(self, source: EventSource) -> Took:
        """Discover every worker; return how long it takes until all is known."""
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        for slot, worker_id in enumerate(worker_ids()):
            card = WorkerCard(
                worker_id=worker_id,
                incarnation=EPOCH,
                model=ModelName("m"),
                role=Role.BOTH,
                block_size=64,
                context_length=1 << 20,
                address="nowhere",
                namespace=NAMESPACE,
                component=COMPONENT,
                event_source=source,
            )
            self.subscriber.follow(card)
            self.pump.joined(WorkerRank(worker_id, RANK), Slot(slot), EPOCH)
        async with asyncio.timeout(LIMIT_S):
            while not self.knows_all():  # noqa: ASYNC110 - a millisecond more or less is no matter
                await asyncio.sleep(0.0005)
        return Took(time.perf_counter() - began_s, time.process_time() - began_cpu_s)

    def knows_all(self) -> bool:
        """Whether every feed is live and every block held."""
        if any(feed.state is not FeedState.LIVE for _, feed in self.pump.feeds()):
            return False
        return sum(self.index.held(Slot(slot)) for slot in range(len(worker_ids()))) == BLOCKS


class Bench:
    """One nats-server and one process of workers."""

    def __init__(self, url: str, sources: Sources) -> None:
        self._url = url
        self._sources = sources
        self._n_routers = 0

    @asynccontextmanager
    async def on_jetstream(self) -> AsyncIterator[tuple[Router, JetStreamSubscriber]]:
        client = await nats.connect(self._url)
        recovery = NatsRecovery(client, namespace=NAMESPACE, on_malformed=fail)
        self._n_routers += 1
        subscriber = JetStreamSubscriber(
            client, recovery, namespace=NAMESPACE, replica_name=f"bench-{self._n_routers}"
        )
        router = Router(subscriber)
        yield router, subscriber
        router.pump.close()
        await subscriber.close()
        await recovery.close()
        await client.close()

    async def from_stream(self) -> Took:
        async with self.on_jetstream() as (router, _):
            return await router.learn(self._sources.jetstream)

    async def from_nats(self) -> Took:
        client = await nats.connect(self._url)
        recovery = NatsRecovery(client, namespace=NAMESPACE, on_malformed=fail)
        subscriber = NatsEventSubscriber(client, recovery, namespace=NAMESPACE, on_malformed=fail)
        await subscriber.start()
        router = Router(subscriber)
        took = await router.learn(EventSource(EventLane.NATS))
        router.pump.close()
        await subscriber.close()
        await recovery.close()
        await client.close()
        return took

    async def from_zmq(self) -> Took:
        subscriber = ZmqEventSubscriber(on_malformed=fail)
        router = Router(subscriber)
        took = await router.learn(self._sources.zmq)
        router.pump.close()
        await subscriber.close()
        return took

    async def take_snapshot(self) -> tuple[Took, float]:
        """Take one while a router runs; also the longest time for which its event loop had no turn."""
        async with self.on_jetstream() as (router, subscriber):
            await router.learn(self._sources.jetstream)
            cache = EventCacheView(router.index, router.pump)
            snapshots = IndexSnapshots(subscriber, lambda: [cache], messages_max=0)
            pauses: list[float] = []
            ticking = asyncio.create_task(tick(pauses))
            began_s, began_cpu_s = time.perf_counter(), time.process_time()
            if await snapshots.check() != 1:
                raise SystemExit("no snapshot was taken")
            took = Took(time.perf_counter() - began_s, time.process_time() - began_cpu_s)
            ticking.cancel()
            return took, max(pauses)


async def tick(pauses: list[float]) -> None:
    """Note for how long the event loop does not come round."""
    last_s = time.perf_counter()
    while True:
        await asyncio.sleep(0)
        now_s = time.perf_counter()
        pauses.append(now_s - last_s)
        last_s = now_s


def lines_of(variant: str, rounds: list[Took]) -> list[Line]:
    row = "Recover 1 M blocks"
    return [
        Line(row, variant, "ms", measured([[MS * took.clock_s] for took in rounds])),
        Line(
            row, f"{variant}, processor time of the router", "ms", measured([[MS * t.cpu_s] for t in rounds])
        ),
    ]


async def measure(url: str, sources: Sources, note: Callable[[str], None]) -> list[Line]:
    bench = Bench(url, sources)
    lines = []
    for variant, learn in (
        ("by local indexers, over NATS", bench.from_nats),
        ("by local indexers, over zmq", bench.from_zmq),
        ("by the stream alone", bench.from_stream),
    ):
        note(variant)
        lines += lines_of(variant, [await learn() for _ in range(ROUNDS)])
    note("taking a snapshot")
    took, pause_s = await bench.take_snapshot()
    row = "Store 1 M blocks"
    lines.append(Line(row, "a snapshot, and the stream purged", "ms", measured([[MS * took.clock_s]])))
    lines.append(Line(row, "processor time of the router", "ms", measured([[MS * took.cpu_s]])))
    lines.append(Line(row, "longest pause of the router", "ms", measured([[MS * pause_s]])))
    note("by a snapshot")
    lines += lines_of("by a snapshot", [await bench.from_stream() for _ in range(ROUNDS)])
    return lines


@click.command()
def main() -> None:
    """Measure, print the table, and write the result file."""
    load_average = os.getloadavg()
    console = open_console()
    spawn = get_context("spawn")
    here: Connection
    with tempfile.TemporaryDirectory() as store, nats_server("-js", "-sd", store) as url:
        here, there = spawn.Pipe()
        worker = spawn.Process(target=serve, args=(url, there), daemon=True)
        worker.start()
        try:
            with console.status("a million blocks are published") as status:
                sources = here.recv()
                lines = asyncio.run(measure(url, sources, status.update))
        finally:
            here.send(None)
            worker.join(10.0)
            worker.kill()
    versions = {name: version(name) for name in ("kvrouter", "nats-py", "pyzmq")}
    report("recovery", lines, versions, load_average, console, keep=True)


if __name__ == "__main__":
    main()

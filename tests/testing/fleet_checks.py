"""What must hold of a fleet of processes once nothing runs in it any more.

The ledgers are empty, every rank's feed is live and its blocks in the index are those of its engine's cache,
no KV left its domain, no worker runs a leg that nobody reads, and no process met a mistake of ours.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import nats

from kvrouter.core.events import Medium, unpack_hashes
from kvrouter.core.hashing import Prompt
from kvrouter.core.ids import DpRank, WorkerId, WorkerRank
from kvrouter.core.workers import EventTransport, WorkerCard
from kvrouter.transports.events.nats_recovery import NatsRecovery
from kvrouter.transports.events.zmq import ZmqEventSubscriber
from kvrouter.transports.records.file import FileDiscovery
from kvrouter.transports.records.nats import NatsDiscovery
from kvrouter.transports.records.port import Discovery, Gone
from tests.testing.processes import Fleet, Frontend, eventually

BLOCK_SIZE = 64

MISTAKES = ("Traceback", "Exception in callback", "internal_error", "http_handler_failed", "never retrieved")
KV_CARRIED = re.compile(r"KV from (\S+|no domain) to (\S+|no domain): ")
"""What an engine that was stopped carried, by its own account, which needs no router to be right."""


class WorkerCaches:
    """Asks every worker of a fleet what its engine's cache holds, over the planes, as a router would."""

    def __init__(self, discovery: Discovery, zmq: ZmqEventSubscriber, recovery: NatsRecovery | None) -> None:
        self.cards: dict[int, WorkerCard] = {}
        self._discovery = discovery
        self._zmq = zmq
        self._recovery = recovery

    async def start(self) -> None:
        await self._discovery.watch(self._on_card, self._on_gone)

    async def of(self, worker_id: int, dp_rank: int) -> set[int] | None:
        """The sequence hashes of a rank's blocks; None when it does not answer."""
        card = self.cards.get(worker_id)
        if card is None:
            return None
        rank = WorkerRank(WorkerId(worker_id), DpRank(dp_rank))
        if card.event_source.transport is EventTransport.ZMQ:
            end = self._zmq.follow(card)
            snapshot = await self._zmq.recover_snapshot(rank)
            end()
        else:
            assert self._recovery is not None
            snapshot = await self._recovery.recover_snapshot(rank)
        if snapshot is None or snapshot.epoch != card.incarnation:
            return None
        return {
            each
            for held in snapshot.events
            if held.medium is Medium.GPU
            for each in unpack_hashes(held.sequence_hashes)
        }

    def _on_card(self, card: WorkerCard) -> None:
        self.cards[card.worker_id] = card

    def _on_gone(self, worker_id: WorkerId, incarnation: int, _why: Gone) -> None:
        known = self.cards.get(worker_id)
        if known is not None and known.incarnation == incarnation:
            del self.cards[worker_id]


@asynccontextmanager
async def open_caches(fleet: Fleet) -> AsyncIterator[WorkerCaches]:
    """Look at the caches of a fleet; the namespace and the planes are the fleet's."""
    needs_nats = fleet.environ["DYN_DISCOVERY_BACKEND"] == "nats" or fleet.environ.get(
        "DYN_EVENT_PLANE", "zmq"
    ) in ("nats", "jetstream")
    zmq = ZmqEventSubscriber(
        token=fleet.environ.get("KVROUTER_PLANE_TOKEN"), on_malformed=_never, on_foreign=_never
    )
    client = await nats.connect(fleet.environ["NATS_SERVER"].split(",")) if needs_nats else None
    token = fleet.environ.get("KVROUTER_PLANE_TOKEN", "")
    recovery = None
    discovery: Discovery
    if client is not None:
        recovery = NatsRecovery(client, namespace=fleet.namespace, token=token, on_malformed=_never)
    if client is not None and fleet.environ["DYN_DISCOVERY_BACKEND"] == "nats":
        discovery = NatsDiscovery(
            client, namespace=fleet.namespace, token=token, on_trouble=_never, on_refused=_never
        )
    else:
        discovery = FileDiscovery(
            fleet.folder / "discovery", namespace=fleet.namespace, on_trouble=_never, on_refused=_never
        )
    caches = WorkerCaches(discovery, zmq, recovery)
    try:
        await caches.start()
        yield caches
    finally:
        await discovery.close()
        await zmq.close()
        if client is not None:
            await client.close()


Prompts = Sequence[list[int]]
"""Prompts that the fleet has answered."""


async def wait_until_consistent(
    fleet: Fleet, frontends: Sequence[Frontend], *, workers: int, asked: Prompts = ()
) -> None:
    """Wait until everything that must hold does; fails with what does not."""
    wrong: list[str] = []

    async def is_well() -> bool:
        wrong[:] = [
            trouble
            for frontend in frontends
            for trouble in await _troubles(frontend, caches, workers=workers, asked=asked)
        ]
        return not wrong

    async with open_caches(fleet) as caches:
        try:
            await eventually(is_well)
        except AssertionError:
            raise AssertionError("\n".join(wrong)) from None
    for running in fleet.processes:
        lines = running.lines()
        for mistake in (
            "Traceback",
            "Exception in callback",
            "internal_error",
            "http_handler_failed",
            "never retrieved",
        ):
            at = lines.find(mistake)
            assert at < 0, f"{running.name}: {lines[max(0, at - 500) : at + 4_000]}"
        carried = KV_CARRIED.findall(lines)
        assert all(source == target for source, target in carried), f"{running.name} carried KV: {carried}"


async def _troubles(frontend: Frontend, caches: WorkerCaches, *, workers: int, asked: Prompts) -> list[str]:
    page, metrics = await asyncio.gather(frontend.fleet(), frontend.metrics())
    name = frontend.name
    troubles = [
        f"{name}: {metric} is {metrics.total(metric)}"
        for metric in (
            "ledger_leases",
            "ledger_active_blocks",
            "ledger_prefill_tokens",
            "queue_depth",
            "requests_active",
            "replica_leases",
        )
        if metrics.total(metric)
    ]
    crossed = [labels for labels, _ in metrics.of("handoffs_total") if len({*labels.values()} - {"none"}) > 1]
    assert not crossed, f"{name}: KV left its domain: {crossed}"
    if page["running_requests"]:
        troubles.append(f"{name}: {page['running_requests']} requests run")
    if not page["discovery"]["reachable"]:
        troubles.append(f"{name}: discovery is lost")
    if len(page["workers"]) != workers:
        troubles.append(f"{name}: knows {[each['worker_id'] for each in page['workers']]}")
    if missing := await frontend.models_without_tokenizer(page["workers"]):
        troubles.append(f"{name}: has no tokenizer of {sorted(missing)}")
    held: dict[tuple[int, int], set[int]] = {}
    for worker in page["workers"]:
        troubles += await _troubles_of(name, worker, caches, held)
    if not troubles:
        for prompt in asked:
            troubles += await _wrong_overlaps(frontend, prompt, held)
    return troubles


async def _troubles_of(
    name: str, worker: dict[str, Any], caches: WorkerCaches, held: dict[tuple[int, int], set[int]]
) -> list[str]:
    worker_id = worker["worker_id"]
    where = f"{name}: worker {worker_id}"
    if not worker["alive"] or worker["lapsed"] or worker["draining"] or worker["engine_silent"]:
        states = " ".join(
            f"{name}={worker[name]}" for name in ("alive", "lapsed", "draining", "engine_silent")
        )
        return [f"{where}: {states}"]
    troubles = []
    for rank in worker["ranks"]:
        if rank["report"] is not None and (
            rank["report"]["active_blocks"] or rank["report"]["active_prefill_tokens"]
        ):
            troubles.append(f"{where}: legs run: {rank['report']}")
        if rank["feed"] is None or rank["feed"]["state"] != "live" or rank["feed"]["kv_events_missing"]:
            troubles.append(f"{where}: its feed is {rank['feed']}")
            continue
        blocks = await caches.of(worker_id, rank["dp_rank"])
        if blocks is None or len(blocks) != rank["index_blocks"]:
            holds = "nothing known" if blocks is None else len(blocks)
            troubles.append(f"{where}: {rank['index_blocks']} blocks in the index, {holds} in its cache")
        held[worker_id, rank["dp_rank"]] = blocks or set()
    return troubles


async def _wrong_overlaps(
    frontend: Frontend, prompt: list[int], held: dict[tuple[int, int], set[int]]
) -> list[str]:
    """Where the router's overlap of a prompt is not what the rank's cache holds of its beginning."""
    hashes = unpack_hashes(Prompt(prompt, block_size=BLOCK_SIZE).sequence_hashes)
    body = {"model": "mock", "prompt": prompt, "max_tokens": 1}
    reply = await frontend.http.post("/v1/route/explain", json=body)
    explained = reply.raise_for_status().json()
    wrong = []
    for leg in ("prefill", "decode"):
        for row in (explained[leg] or {"candidates": ()})["candidates"]:
            blocks = held[row["worker_id"], row["dp_rank"]]
            true = next((at for at, each in enumerate(hashes) if each not in blocks), len(hashes))
            if row["overlap_blocks"] != true:
                wrong.append(
                    f"{frontend.name}: {row['overlap_blocks']} blocks at {row['worker_id']}, not {true}"
                )
    return wrong


def _never(*why: object) -> None:
    raise AssertionError(why)

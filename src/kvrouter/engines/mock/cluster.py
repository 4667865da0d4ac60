"""Mock engines of this process and the links between them, driven by one timer.

Simulated time is real time times ``speedup``. When the machine cannot simulate that fast, the simulated clock
slows down instead of the event loop: one turn works for ``TURN_MAX_S`` at most and then leaves the loop to
others for as long as it took, and the seconds lost are counted in ``slipped_s``. What is computed stays the
same.

A stream holds ``stream_tokens_max`` tokens at most. A reader that does not read stops its own sequence only:
the engine leaves it out of its steps until the reader goes on, and takes its memory for others when it must.
"""

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from math import isfinite
from secrets import token_hex
from time import monotonic

from kvrouter.core.errors import ConfigError
from kvrouter.core.events import KvEvent
from kvrouter.core.hosts import advertised_host
from kvrouter.core.ids import DpRank, WorkerId
from kvrouter.core.requests import EngineChunk, EngineRequest, merge_chunks
from kvrouter.engines.mock.transfer import TransferCounts, Transfers, TransferSettings
from kvrouter.engines.mock_engine.config import MockConfig
from kvrouter.engines.mock_engine.engine import EngineFull, MockEngine
from kvrouter.engines.mock_engine.fabric import Fabric
from kvrouter.engines.mock_engine.handoff import LegId
from kvrouter.engines.mock_engine.mock_links import DomainPair, LinkChange, Links
from kvrouter.engines.mock_engine.network import Carried
from kvrouter.engines.mock_engine.remote import Peer
from kvrouter.engines.mock_engine.sequence import LegSink, sequence_key
from kvrouter.engines.port import EventsSink, LoadSink
from kvrouter.transports.requests.port import StreamBroken, WorkerFull, WorkerUnreachable


class MockStream:
    """The answer to one leg. ``on_credit`` gets the number of tokens read, ``on_cancel`` the reason to end.

    Thousands of prefill legs that have ended are kept, to be cancelled: an empty one is small.
    """

    __slots__ = (
        "_broken",
        "_chunks",
        "_ended",
        "_on_cancel",
        "_on_credit",
        "_read_tokens",
        "_reader",
        "_refill_tokens",
    )

    def __init__(
        self, *, tokens_max: int, on_credit: Callable[[int], None], on_cancel: Callable[[str], None]
    ) -> None:
        self._on_credit = on_credit
        self._on_cancel = on_cancel
        self._refill_tokens = max(1, tokens_max // 2)
        self._chunks: list[EngineChunk] = []
        self._read_tokens = 0
        self._ended = False
        self._broken: str | None = None
        self._reader: asyncio.Future[None] | None = None

    def __aiter__(self) -> "MockStream":
        return self

    async def __anext__(self) -> EngineChunk:
        while not self._chunks:
            if self._broken is not None:
                raise StreamBroken(self._broken)
            if self._ended:
                raise StopAsyncIteration
            if self._reader is not None:
                raise RuntimeError("a stream has one reader")
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        chunk = self._chunks[0] if len(self._chunks) == 1 else merge_chunks(self._chunks)
        self._chunks.clear()
        self._read_tokens += len(chunk.token_ids)
        if self._read_tokens >= self._refill_tokens and not self._ended:
            self._on_credit(self._read_tokens)
            self._read_tokens = 0
        return chunk

    def cancel(self, reason: str) -> None:
        """End the leg; a prefill leg that has ended gives up its KV unless a decode leg came for it."""
        if self._broken is None:
            self._on_cancel(reason)

    def push(self, chunk: EngineChunk) -> None:
        """The engine generated more."""
        self._chunks.append(chunk)
        self._ended = self._ended or chunk.finish is not None
        self._wake()

    def break_off(self, why: str) -> None:
        """The engine is gone; output from before is still read."""
        if not self._ended and self._broken is None:
            self._broken = why
            self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


TURN_MAX_S = 0.005
MOMENTS_BETWEEN_LOOKS_AT_THE_CLOCK = 16


class MockEngineHandle:
    """One mock engine of a cluster, as an :class:`~kvrouter.engines.port.Engine`.

    Every start begins with an empty cache and without earlier requests.
    """

    def __init__(
        self, cluster: "MockCluster", config: MockConfig, worker_id: WorkerId, domains: Mapping[str, str]
    ) -> None:
        self.worker_id = worker_id
        self.domains = domains
        self.config = config
        self._cluster = cluster
        self._engine: MockEngine | None = None

    @property
    def serving(self) -> bool:
        """True between start and stop."""
        return self._engine is not None

    @property
    def idle(self) -> bool:
        """True when no leg runs or waits here and no KV waits to be pulled."""
        return self._engine is None or self._engine.idle

    async def start(self, on_events: EventsSink, on_load: LoadSink) -> None:
        """Begin to serve; every store and removal reaches ``on_events`` in order, per rank."""
        self._engine = self._cluster.join(self, on_events, on_load)

    async def submit(self, request: EngineRequest) -> MockStream:
        """Accept a leg. WorkerUnreachable when the engine is not serving or full; InvalidRequest when it
        could never serve it.
        """
        if self._engine is None:
            raise WorkerUnreachable(f"worker {self.worker_id}: the engine is not serving")
        try:
            return self._cluster.submit(self.worker_id, request)
        except EngineFull as full:
            raise WorkerFull(full.message) from full

    def snapshot(self, dp_rank: DpRank) -> tuple[KvEvent, ...]:
        """Return the blocks that the rank holds now, as stores with parents first; the events that led here
        have reached ``on_events`` before.
        """
        if self._engine is None:
            return ()
        self._cluster.deliver()
        return self._engine.snapshot(dp_rank)

    def held_blocks(self, dp_rank: DpRank) -> int | None:
        """Return how many blocks the rank holds now; all events up to it have reached ``on_events``."""
        if self._engine is None:
            return None
        self._cluster.deliver()
        return self._engine.held_blocks(dp_rank)

    async def stop(self) -> None:
        """Stop serving; open streams break."""
        self.kill("the engine was stopped")

    def kill(self, why: str = "the engine died") -> None:
        """Die at once: streams break, no event follows, KV that waits here is lost. Idempotent."""
        if self._engine is not None:
            self._engine = None
            self._cluster.leave(self.worker_id, why)


class MockCluster:
    """Mock engines of one process that share links and a clock. Use it from one event loop.

    With ``transfers``, decode legs fetch KV from other processes, and after :meth:`listen` other processes
    fetch KV from here; without, all legs of a request run here.
    """

    def __init__(
        self,
        *,
        speedup: float = 1.0,
        links: Links | None = None,
        stream_tokens_max: int = 512,
        tick_s: float = 0.001,
        transfers: TransferSettings | None = None,
    ) -> None:
        if not (isfinite(speedup) and speedup > 0.0):
            raise ConfigError(f"speedup: {speedup} is not finite and above 0", param="speedup")
        if stream_tokens_max < 1:
            raise ConfigError("stream_tokens_max: must be at least 1", param="stream_tokens_max")
        self.slipped_s = 0.0
        self._speedup = speedup
        self._stream_tokens_max = stream_tokens_max
        self._tick_s = tick_s
        self._fabric = Fabric(links or Links(), clock_rate=speedup, life=f"{token_hex(4)}-")
        self._transfers = None if transfers is None else Transfers(transfers, self._fabric, self._at_now)
        self._sinks: dict[WorkerId, tuple[EventsSink, LoadSink]] = {}
        self._streams: dict[LegId, MockStream] = {}
        self._origin_s = monotonic()
        self._timer: asyncio.TimerHandle | None = None
        self._turn_at_s = 0.0
        self._rested_at_s = 0.0

    def add(self, config: MockConfig, *, worker_id: WorkerId, domains: Mapping[str, str]) -> MockEngineHandle:
        """Return an engine in ``domains``, by level, not started yet."""
        return MockEngineHandle(self, config, worker_id, domains)

    @property
    def speedup(self) -> float:
        """How many simulated seconds pass in a real one, where the machine is fast enough."""
        return self._speedup

    @property
    def now_s(self) -> float:
        """The simulated second that it is."""
        return (monotonic() - self._origin_s) * self._speedup

    def change_link(self, change: LinkChange) -> None:
        """Change a link now, also under the transfers that are on it."""
        self._at_now(lambda now: self._fabric.change_link(now, change))

    @property
    def advertise(self) -> Peer | None:
        """Where other processes come for KV that is kept here; None until :meth:`listen`."""
        return self._fabric.address

    async def listen(self, host: str, port: int = 0, *, advertise_host: str | None = None) -> Peer:
        """Let other processes come for KV that is kept here; return the address given to them.

        Engines start afterwards. One that takes bootstrap handoffs has this address in its configuration.
        Raises ConfigError when it cannot listen there, or when ``host`` is every address of the machine and
        no address to advertise is given.
        """
        if self._transfers is None:
            raise ConfigError("transfers: listening needs them", param="transfers")
        if self._fabric.address is not None or self._sinks:
            raise ConfigError("listen: once, and before an engine starts", param="host")
        advertised = advertised_host(host, advertise_host)
        self._fabric.address = Peer(advertised, await self._transfers.listen(host, port))
        return self._fabric.address

    async def close(self) -> None:
        """Cut the connections to other processes, as the end of this one would. Idempotent."""
        if self._transfers is not None:
            await self._transfers.close()

    def transfer_counts(self) -> TransferCounts:
        """Pulls from and by other processes so far, and the connections that were refused."""
        return TransferCounts() if self._transfers is None else self._transfers.counts

    def carried(self) -> dict[DomainPair, Carried]:
        """Transfers and bytes between each pair of domains so far, by decode legs of this process: the
        puller counts, wherever the KV was kept.
        """
        return self._fabric.network.carried()

    def watch_legs(self, on_leg_ended: LegSink) -> None:
        """Give ``on_leg_ended`` the stamps of each leg that generates all of its tokens, in simulated
        seconds, which no delay of this process changes.
        """
        self._fabric.watch_legs(on_leg_ended)

    def check_integrity(self) -> list[str]:
        """Return the inconsistencies of all engines; see :meth:`Fabric.check_integrity`."""
        return self._fabric.check_integrity()

    @property
    def idle(self) -> bool:
        """True when no engine runs, queues or pulls anything."""
        return self._fabric.idle

    def join(self, handle: MockEngineHandle, on_events: EventsSink, on_load: LoadSink) -> MockEngine:
        """Bring an engine to life. InvalidRequest when its worker id is taken, ConfigError when others are
        sent elsewhere for its KV.
        """
        given, address = (handle.config.bootstrap_host, handle.config.bootstrap_port), self.advertise
        if address is not None and given not in (address, (None, None)):
            raise ConfigError(
                f"bootstrap_host: {given[0]}:{given[1]} is not {address.host}:{address.port}",
                param="bootstrap_host",
            )
        engine = self._fabric.add(handle.config, worker_id=handle.worker_id, domains=handle.domains)
        self._sinks[handle.worker_id] = (on_events, on_load)
        self._turn_soon()
        return engine

    def leave(self, worker_id: WorkerId, why: str) -> None:
        """Take an engine away; its streams break, and others learn that its KV is lost."""
        now = self._catch_up()
        del self._sinks[worker_id]
        self._fabric.remove(now, worker_id)
        for leg_id in [leg_id for leg_id in self._streams if leg_id.worker_id == worker_id]:
            self._streams.pop(leg_id).break_off(f"worker {worker_id}: {why}")
        self._notify_peers()
        self._turn_soon()

    def submit(self, worker_id: WorkerId, request: EngineRequest) -> MockStream:
        """Submit a leg to an engine; raises as :meth:`MockEngine.submit` does."""
        now = self._catch_up()
        if LegId(worker_id, sequence_key(request)) in self._streams:
            self.deliver()  # an earlier leg of this name may have ended, and its reader has not heard yet
        source_at = None if self._transfers is None else self._fabric.source_elsewhere(request)
        leg_id = self._fabric.submit(
            now, worker_id, request, credit_tokens=self._stream_tokens_max, source_at=source_at
        )
        stream = self._streams[leg_id] = MockStream(
            tokens_max=self._stream_tokens_max,
            on_credit=partial(self._give_credit, leg_id),
            on_cancel=partial(self._cancel, leg_id),
        )
        self._notify_peers()
        self._turn_soon()
        return stream

    def deliver(self) -> None:
        """Report what happened: KV events first, then load, then tokens."""
        outputs = self._fabric.take_outputs()
        for rank, events in outputs.events:
            self._sinks[rank.worker_id][0](rank.dp_rank, tuple(events))
        for report in outputs.loads:
            self._sinks[report.rank.worker_id][1](report)
        for leg_id, chunk in outputs.chunks:
            stream = self._streams[leg_id] if chunk.finish is None else self._streams.pop(leg_id)
            stream.push(chunk)

    def _cancel(self, leg_id: LegId, reason: str) -> None:
        self._at_now(lambda now: self._fabric.cancel(now, leg_id, reason))

    def _give_credit(self, leg_id: LegId, tokens: int) -> None:
        self._at_now(lambda now: self._fabric.give_credit(now, leg_id, tokens))

    def _at_now(self, act: Callable[[float], None]) -> None:
        """Have something happen at this moment, and others learn what follows."""
        act(self._catch_up())
        self._notify_peers()
        self._turn_soon()

    def _notify_peers(self) -> None:
        if self._transfers is not None:
            self._transfers.tell(self._fabric.pulls.take_outputs())

    def _turn(self) -> None:
        """Simulate up to now, report the outputs, and arm the timer for the next event."""
        self._timer = None
        began_s = monotonic()
        try:
            self._catch_up()
            self._notify_peers()
            self.deliver()
        finally:
            ended_s = monotonic()
            self._rested_at_s = ended_s + max(self._tick_s, ended_s - began_s)
            next_s = self._fabric.next_time()
            if next_s is not None:
                self._turn_at(self._origin_s + next_s / self._speedup)

    def _catch_up(self) -> float:
        """Simulate up to now, or for ``TURN_MAX_S``; return the simulated second that is reached."""
        now_s = monotonic()
        until = (now_s - self._origin_s) * self._speedup
        reached = self._fabric.advance(until, moments_max=MOMENTS_BETWEEN_LOOKS_AT_THE_CLOCK)
        while reached < until and monotonic() - now_s < TURN_MAX_S:
            reached = self._fabric.advance(until, moments_max=MOMENTS_BETWEEN_LOOKS_AT_THE_CLOCK)
        if reached < until:
            lost_s = (until - reached) / self._speedup
            self._origin_s += lost_s
            self.slipped_s += lost_s
        return reached

    def _turn_soon(self) -> None:
        """Make sure that what happened just now is processed and reported."""
        self._turn_at(monotonic())

    def _turn_at(self, when_s: float) -> None:
        """Have a turn at ``when_s``, or when the loop has had its rest."""
        when_s = max(when_s, self._rested_at_s)
        if self._timer is not None:
            if self._turn_at_s <= when_s:
                return
            self._timer.cancel()
        self._turn_at_s = when_s
        delay_s = max(0.0, when_s - monotonic())
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._turn)

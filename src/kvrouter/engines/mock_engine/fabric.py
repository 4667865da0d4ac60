"""Mock engines of one process and the links between them, on one clock that the caller advances.

The fabric connects prefill and decode legs. It keeps the order of all events at all engines and on all links,
so that the same inputs at the same seconds give the same outputs, however rarely it is advanced. Legs of
other processes take part by messages, which the caller delivers here and sends from here.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from msgspec import Struct

from kvrouter.core.errors import InvalidRequest
from kvrouter.core.events import KvEvents
from kvrouter.core.ids import WorkerId, WorkerRank
from kvrouter.core.requests import EngineChunk, EngineRequest, KvLoss, Leg
from kvrouter.core.workers import LoadReport
from kvrouter.engines.mock_engine.config import MockConfig
from kvrouter.engines.mock_engine.engine import KvReady, KvWanted, LegEnded, MockEngine
from kvrouter.engines.mock_engine.handoff import (
    Command,
    Deliver,
    HandoffFailed,
    HandoffName,
    Handoffs,
    LegId,
    Pull,
    Release,
    RemoteSink,
    Sink,
    StopPull,
)
from kvrouter.engines.mock_engine.mock_links import LinkChange, Links, Place
from kvrouter.engines.mock_engine.network import Arrived, Network
from kvrouter.engines.mock_engine.ranks import EngineRanks, rank_of
from kvrouter.engines.mock_engine.remote import (
    REASON_CHARS_MAX,
    Done,
    Failed,
    GiveUp,
    Join,
    Peer,
    PullId,
    Pulls,
    Ready,
    RemotePull,
    SinkMessage,
    SourceMessage,
    Want,
    source_peer,
)
from kvrouter.engines.mock_engine.sequence import UNLIMITED_CREDIT, Content, LegSink, sequence_key

_PREFILL, _AGGREGATED = Leg.PREFILL, Leg.AGGREGATED
"""Constants, because access to an enumeration's members is slow before Python 3.12."""


class FabricOutputs(Struct):
    """The outputs of all engines; for each engine, events come before the chunks that they explain."""

    events: list[tuple[WorkerRank, KvEvents]] = []
    loads: list[LoadReport] = []
    chunks: list[tuple[LegId, EngineChunk]] = []


@dataclass(slots=True)
class _Member:
    engine: MockEngine
    place: Place


class Fabric:
    """All engines of one process. ``now`` is seconds on the caller's clock and never goes back.

    ``clock_rate`` is how many of those seconds pass in one real second: a wait for another process lasts
    ``kv_wait_expiry_s`` on both clocks. ``life`` distinguishes this process from others. With ``leaps`` its
    engines skip steps that change only the number of tokens.
    """

    def __init__(self, links: Links, *, clock_rate: float = 1.0, life: str = "", leaps: bool = False) -> None:
        self.address: Peer | None = None
        self._on_leg_ended: LegSink | None = None
        self._expiry_scale = max(1.0, clock_rate)
        self._life = life
        self._leaps = leaps
        self.ranks = EngineRanks()
        """The ranks of all engines; their ``has_outputs`` says whether any did something since the last
        :meth:`take_outputs`.
        """
        self._by_rank: dict[int, _Member] = {}
        """Members by the numbers of their ranks."""
        self._members: dict[WorkerId, _Member] = {}
        self._ids: dict[str, WorkerId] = {}
        self._links = links
        self.network = Network(links)
        self._handoffs = Handoffs()
        self.pulls = Pulls()
        """Pulls from and to other processes, and the messages for them."""
        self._added = 0

    def add(self, config: MockConfig, *, worker_id: WorkerId, domains: Mapping[str, str]) -> MockEngine:
        """Add an engine that sits in ``domains``. InvalidRequest when the worker is here already."""
        if worker_id in self._members:
            raise InvalidRequest(f"worker {worker_id} is in the fabric already", param="worker_id")
        self._added += 1
        engine_id = f"mock-{worker_id}-{self._life}{self._added}"
        engine = MockEngine(
            config, worker_id=worker_id, engine_id=engine_id, leaps=self._leaps, ranks=self.ranks
        )
        engine.kv_address = self.address
        engine.on_leg_ended = self._on_leg_ended
        member = self._members[worker_id] = _Member(engine, self._links.place(domains, worker_id))
        self._by_rank.update(dict.fromkeys(engine.rank_numbers, member))
        self._ids[engine.engine_id] = worker_id
        return engine

    def move(self, now: float, worker_id: WorkerId, domains: Mapping[str, str]) -> None:
        """A worker sits in other ``domains`` from now on: transfers that begin later go from and to there."""
        self.advance_before(now)
        self._members[worker_id].place = self._links.place(domains, worker_id)

    def change_link(self, now: float, change: LinkChange) -> None:
        """Change a link, under the transfers that are on it too; see :meth:`Network.change`."""
        self.advance_before(now)
        self.network.change(now, change)

    def watch_legs(self, on_leg_ended: LegSink) -> None:
        """Give ``on_leg_ended`` the stamps of each leg that generates all of its tokens, from now on."""
        self._on_leg_ended = on_leg_ended
        for member in self._members.values():
            member.engine.on_leg_ended = on_leg_ended

    def engine(self, worker_id: WorkerId) -> MockEngine:
        """Return the engine of a worker. KeyError when it is not here."""
        return self._members[worker_id].engine

    def remove(self, now: float, worker_id: WorkerId) -> None:
        """Take an engine away at once, as if its machine had died; legs that exchange KV with it fail."""
        self.advance_before(now)
        member = self._members.pop(worker_id)
        del self._ids[member.engine.engine_id]
        member.engine.leave()
        for rank in member.engine.rank_numbers:
            del self._by_rank[rank]
        for leg_id in self._handoffs.legs_of(worker_id):
            self._do(now, self._handoffs.leg_ended(now, leg_id, f"worker {worker_id} is gone", lost=True))
        for pull in self.pulls.of_worker(worker_id):
            self._end_pull(now, pull)
            self.pulls.send_to_source(pull, None)

    def submit(
        self,
        now: float,
        worker_id: WorkerId,
        request: EngineRequest,
        *,
        credit_tokens: int = UNLIMITED_CREDIT,
        source_at: Peer | None = None,
        content: Content | None = None,
    ) -> LegId:
        """Submit a leg to an engine; ``content`` and errors are those of :meth:`MockEngine.submit`.

        ``source_at`` is the process from which the leg fetches KV, if it is not this one.
        """
        self.advance_before(now)
        member = self._members[worker_id]
        given, fetched = _handoff_names(member.engine, request)
        if given is not None:
            self._handoffs.may_join(given, as_source=True)
        if fetched is not None and source_at is None:
            self._handoffs.may_join(fetched, as_source=False)
        key = member.engine.submit(now, request, credit_tokens=credit_tokens, content=content)
        leg_id = LegId(worker_id, key)
        expiry_s = member.engine.config.kv_wait_expiry_s
        if given is not None:
            self._handoffs.source_joins(given, leg_id, expiry_s=expiry_s * self._expiry_scale)
        if fetched is not None:
            may_follow = request.bootstrap is not None
            if source_at is None:
                self._sink_joins(now, fetched, leg_id, expiry_s, may_follow)
            else:
                self.pulls.open(leg_id, source_at, Join(fetched, expiry_s, may_follow))
        return leg_id

    def source_elsewhere(self, request: EngineRequest) -> Peer | None:
        """Return the process with the KV that a leg fetches; None if it is this one, or the request does not
        state it.
        """
        peer = source_peer(request)
        here = peer == self.address or any(m.engine.is_source_for(request) for m in self._members.values())
        return None if here else peer

    def receive_from_sink(self, now: float, sink: RemoteSink, message: SinkMessage | None) -> None:
        """Handle ``message`` from a decode leg of another process; None when the connection to it is lost.

        Does nothing after the handoff has ended.
        """
        self.advance_before(now)
        match message:
            case Join(name, expiry_s, may_follow):
                try:
                    self._handoffs.may_join(HandoffName(name), as_source=False)
                except InvalidRequest as taken:
                    self.pulls.send_to_sink(sink, Failed(KvLoss.UNKNOWN, taken.message[:REASON_CHARS_MAX]))
                else:
                    self._sink_joins(now, HandoffName(name), sink, expiry_s, may_follow)
            case Want(kv_tokens):
                if self._handoffs.is_in(sink):
                    self._do(now, self._handoffs.kv_wanted(now, sink, kv_tokens))
            case Done():
                self._do(now, self._handoffs.remote_pulled(sink))
            case GiveUp(reason):
                self._do(now, self._handoffs.leg_ended(now, sink, reason, lost=False))
            case None:
                self._do(now, self._handoffs.leg_ended(now, sink, "the way to it is lost", lost=True))

    def receive_from_source(self, now: float, pull_id: PullId, message: SourceMessage) -> None:
        """Handle ``message`` from the source of a pull. Does nothing after the pull has ended."""
        self.advance_before(now)
        pull = self.pulls.of_id(pull_id)
        if pull is None:
            return
        match message:
            case Ready(_, kv_bytes, src, handshake):
                sink = self._members[pull.sink.worker_id]
                refusal = sink.engine.config.refusal_of(handshake)
                if refusal:
                    self._end_pull(now, pull)
                    self.pulls.send_to_source(pull, None)  # its KV waits for another engine
                    self._do(now, [HandoffFailed(pull.sink, KvLoss.REFUSED, refusal)])
                elif not pull.moving:
                    pull.moving = True
                    self.network.start(now, pull.key, src, sink.place, kv_bytes)
            case Failed(loss, reason):
                self._end_pull(now, pull)
                self._do(now, [HandoffFailed(pull.sink, loss, reason)])

    def catch_up(self, now: float, worker_id: WorkerId) -> None:
        """Run the skipped steps of an engine that ended before ``now``."""
        self.advance_before(now)
        self._members[worker_id].engine.catch_up(now)

    def cancel(self, now: float, leg_id: LegId, reason: str) -> None:
        """End a leg. For a prefill leg that has ended: give up its KV, unless a decode leg came for it."""
        self.advance_before(now)
        member = self._members.get(leg_id.worker_id)
        if member is None:
            return
        if member.engine.cancel(now, leg_id.key, reason):
            self._settle(now, member)
        else:
            self._do(now, self._handoffs.give_up(leg_id))

    def give_credit(self, now: float, leg_id: LegId, tokens: int) -> None:
        """The reader of a leg made room for ``tokens`` more."""
        member = self._members.get(leg_id.worker_id)
        if member is not None:
            self.advance_before(now)
            member.engine.give_credit(now, leg_id.key, tokens)

    def next_time(self) -> float | None:
        """Return when :meth:`advance` has something to do; None if nothing is due without a new input."""
        earliest = self.ranks.next_time()
        for time in (self.network.next_time(), self._handoffs.next_time()):
            if time is not None and (earliest is None or time < earliest):
                earliest = time
        return earliest

    def run(self, until: float) -> float | None:
        """Run what is due before ``until``, up to the first urgent event: a first or a last token, or KV on
        its way. Return its time; None without one.

        Filled blocks are not urgent: :meth:`take_outputs` has them.
        """
        limit, is_handoff = until, False
        for time in (self.network.next_time(), self._handoffs.next_time()):
            if time is not None and time < limit:
                limit, is_handoff = time, True
        time = self.ranks.run(limit, through=False)
        if time is not None:
            self._settle_ranks(time)
            self._run_ranks(time)
            return time
        if not is_handoff:
            return None
        self._live(limit)
        return limit

    def advance(self, now: float, *, moments_max: int | None = None) -> float:
        """Run all steps due up to ``now``, in order; return the second up to which everything is done.

        It is before ``now`` only if more than ``moments_max`` moments were due.
        """
        done = 0
        while (time := self.next_time()) is not None and time <= now:
            if moments_max is not None and done >= moments_max:
                return time
            self._live(time)
            done += 1
        return now

    def advance_before(self, now: float) -> None:
        """Run all steps due before ``now``, so that inputs of one moment share one step."""
        while (time := self.next_time()) is not None and time < now:
            self._live(time)

    def take_outputs(self, *, with_loads: bool = True) -> FabricOutputs:
        """Return what happened since the last call; engines' loads only ``with_loads``."""
        collected = FabricOutputs()
        for rank, events, load, chunks, _ in self.ranks.take_outputs(with_loads=with_loads):
            engine = self._by_rank[rank].engine
            if events is not None:
                collected.events.append((engine.rank_numbers[rank], events))
            if load is not None:
                collected.loads.append(engine.load_report(rank, load))
            for row in chunks:
                key, chunk = engine.chunk(row)
                collected.chunks.append((LegId(engine.worker_id, key), chunk))
        return collected

    @property
    def idle(self) -> bool:
        """True when no leg runs or waits anywhere, no KV waits, and no process waits for KV from here."""
        return not self._handoffs.has_remote_sinks and all(m.engine.idle for m in self._members.values())

    def check_integrity(self) -> list[str]:
        """Return the inconsistencies of all engines; idle engines must hold no blocks and no handoffs."""
        problems = [
            f"worker {worker_id}: {problem}"
            for worker_id, member in self._members.items()
            for problem in member.engine.check_integrity()
        ]
        if self.idle:
            if len(self._handoffs):
                problems.append(f"idle, and {len(self._handoffs)} handoffs are open")
            if len(self.pulls):
                problems.append(f"idle, and {len(self.pulls)} pulls from other processes are open")
            if len(self.network):
                problems.append(f"idle, and {len(self.network)} transfers are in flight")
        return problems

    def _live(self, time: float) -> None:
        """Do all that is due at ``time``."""
        for arrived in self.network.advance(time) if len(self.network) else ():
            pull = self.pulls.of_key(arrived.key)
            if pull is None:
                self._do(time, self._handoffs.pulled(HandoffName(arrived.key)), arrived)
            else:
                self.pulls.close(pull)
                self.pulls.send_to_source(pull, Done())
                self._do(time, [Deliver(pull.sink)], arrived)
        if expired := self._handoffs.expire(time):
            self._do(time, expired)
        self._run_ranks(time)

    def _run_ranks(self, time: float) -> None:
        """Run the steps of engines that are due at ``time``."""
        while self.ranks.run(time, through=True) is not None:
            self._settle_ranks(time)

    def _settle_ranks(self, time: float) -> None:
        """Settle what happened at one rank that cannot wait."""
        ended, wanting = self.ranks.take_notices()
        if ended or wanting:
            handle = ended[0][0] if ended else wanting[0][0]
            member = self._by_rank[rank_of(handle)]
            member.engine.note(ended, wanting)
            self._settle(time, member)

    def _settle(self, now: float, member: _Member) -> None:
        """Take an engine's notices to the handoffs."""
        for notice in member.engine.take_notices():
            leg_id = LegId(member.engine.worker_id, notice.key)
            pull = self.pulls.of_sink(leg_id)
            match notice:
                case KvReady():
                    self._do(now, self._handoffs.kv_ready(now, leg_id))
                case KvWanted(_, kv_tokens) if pull is not None:
                    self.pulls.send_to_source(pull, Want(kv_tokens))
                case KvWanted(_, kv_tokens):
                    self._do(now, self._handoffs.kv_wanted(now, leg_id, kv_tokens))
                case LegEnded(_, reason) if pull is not None:
                    self._end_pull(now, pull)
                    self.pulls.send_to_source(pull, GiveUp(reason[:REASON_CHARS_MAX]))
                case LegEnded(_, reason):
                    self._do(now, self._handoffs.leg_ended(now, leg_id, reason, lost=False))

    def _sink_joins(
        self, now: float, name: HandoffName, sink: Sink, expiry_s: float, may_follow: bool
    ) -> None:
        expiry_limit_s = expiry_s * self._expiry_scale
        self._do(
            now, self._handoffs.sink_joins(name, sink, expiry_s=expiry_limit_s, source_may_follow=may_follow)
        )

    def _end_pull(self, now: float, pull: RemotePull) -> None:
        self.network.cancel(now, pull.key)
        self.pulls.close(pull)

    def _pull(self, now: float, pull: Pull) -> None:
        """Begin a transfer, unless the engine that fetches refuses the other."""
        src = self._members[pull.source.worker_id]
        handshake, sink = src.engine.config.handshake, pull.sink
        kv_bytes = pull.kv_tokens * src.engine.config.kv_bytes_per_token
        if isinstance(sink, RemoteSink):
            self.pulls.send_to_sink(sink, Ready(pull.kv_tokens, kv_bytes, src.place, handshake))
            return
        dst = self._members[sink.worker_id]
        refusal = dst.engine.config.refusal_of(handshake)
        if refusal:
            self._do(now, self._handoffs.refused(now, sink, refusal))
        else:
            self.network.start(now, pull.handoff, src.place, dst.place, kv_bytes)

    def _do(self, now: float, commands: list[Command], arrived: Arrived | None = None) -> None:
        for command in commands:
            match command:
                case Pull():
                    self._pull(now, command)
                case StopPull(name):
                    self.network.cancel(now, name)
                case Release(leg_id):
                    if (member := self._members.get(leg_id.worker_id)) is not None:
                        member.engine.release_kv(now, leg_id.key)
                case Deliver(RemoteSink()):
                    pass  # its own process said so
                case HandoffFailed(RemoteSink() as sink, loss, reason):
                    self.pulls.send_to_sink(sink, Failed(loss, reason[:REASON_CHARS_MAX]))
                case Deliver(LegId() as leg_id):
                    if (member := self._members.get(leg_id.worker_id)) is not None and arrived is not None:
                        member.engine.kv_arrived(now, leg_id.key, arrived)
                case HandoffFailed(LegId() as leg_id, loss, reason):
                    if (member := self._members.get(leg_id.worker_id)) is not None:
                        member.engine.kv_failed(now, leg_id.key, loss, reason)
                        self._settle(now, member)


def _handoff_names(
    engine: MockEngine, request: EngineRequest
) -> tuple[HandoffName | None, HandoffName | None]:
    """Return the names of the handoffs in which a leg gives its KV and in which it fetches some."""
    if request.leg is _AGGREGATED:
        return None, None
    bootstrap, params = request.bootstrap, request.kv_transfer_params
    if bootstrap is not None:
        name = HandoffName(f"{bootstrap.host}:{bootstrap.port}/{bootstrap.room}")
        return (name, None) if request.leg is _PREFILL else (None, name)
    fetched = None
    if params is not None and (params or request.leg is not _PREFILL):
        fetched = HandoffName(f"{params.get('remote_engine_id')}/{params.get('remote_request_id')}")
    if request.leg is not _PREFILL:
        return None, fetched
    return HandoffName(f"{engine.engine_id}/{sequence_key(request)}"), fetched

"""Whatever is lost, repeated, late or dead: once it is quiet, every router counts what all of them run."""

from dataclasses import dataclass, field

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from kvrouter.core.hashing import Prompt
from kvrouter.core.ids import (
    DpRank,
    Epoch,
    LeaseId,
    LeaseKey,
    ModelName,
    RequestId,
    RouterId,
    Slot,
    WorkerId,
    WorkerRank,
)
from kvrouter.core.replica_messages import Deltas, Goodbye, StateQuestion, SyncMessage
from kvrouter.core.workers import WorkerCard
from kvrouter.kernel.fleet.fleet import Fleet
from kvrouter.kernel.ledger.journal import Journal, SharedLedger
from kvrouter.kernel.ledger.port import NativeLedger
from kvrouter.kernel.ledger.replicas import Asks, Replicas
from kvrouter.transports.sync.nats import decode_message, encode_message
from tests.oracles.ledger import NaiveLedger
from tests.testing.plain_fleets import worker_card

MODEL = ModelName("m")
SEATS = 3
WORKERS = 3
RANKS = [WorkerRank(WorkerId(worker), DpRank(rank)) for worker in range(WORKERS) for rank in (0, 1)]
SILENT_AFTER_S = 5.0

SEAT = st.integers(0, SEATS - 1)
RANK = st.sampled_from(RANKS)
PROMPT = st.lists(st.integers(0, 1), max_size=9).map(lambda tokens: Prompt(tokens, block_size=2))
TOKENS = st.integers(0, 9)


@dataclass
class Open:
    """A lease, as the test itself knows it."""

    lease: LeaseId
    rank: WorkerRank
    prompt: Prompt
    prefill_tokens: int
    track_blocks: bool
    output_blocks: int = 0


@dataclass
class Mail:
    """What is on its way to one router."""

    letters: list[bytes] = field(default_factory=list)


class Router:
    """One router, without its wire: what the service does, done by hand."""

    def __init__(self, router_id: RouterId, now_s: float) -> None:
        self.id = router_id
        self.fleet = Fleet(MODEL, block_size=2)
        self.bare = NativeLedger(1)
        self.journal = Journal(router_id, on_pending=lambda: None, pending_max=5)
        self.replicas = Replicas(router_id, silent_after_s=SILENT_AFTER_S, ask_again_s=1.0)
        self.ledger = SharedLedger(self.bare, self.fleet, self.journal)
        self.replicas.share(
            self.fleet,
            self.bare,
            on_load_decrease=lambda: None,
            before_load_increase=lambda _now_s: None,
            now_s=now_s,
        )
        self.replicas.tick(now_s=now_s)
        self.open: dict[tuple[RequestId, int], Open] = {}
        self.mail = Mail()

    def see(self, worker: WorkerId, incarnation: Epoch | None) -> None:
        """Discovery says that this incarnation is there, or none."""
        card = self.fleet.card(worker)
        known = None if card is None else card.incarnation
        if known == incarnation:
            return
        freed: list[Slot] = []
        if incarnation is None:
            assert known is not None
            freed += self.fleet.leave(worker, known)
        else:
            freed += self.fleet.join(_card(worker, incarnation)).freed
        for slot in freed:
            self.ledger.drop_slot(slot)
        if known is not None:
            self.open = {key: opened for key, opened in self.open.items() if opened.rank.worker_id != worker}
        self.replicas.fleet_changed(MODEL, now_s=0.0)

    def loads(self) -> dict[WorkerRank, tuple[int, int]]:
        self.ledger.ensure_slots(self.fleet.n_slots)
        columns = self.ledger.columns()
        return {
            rank: (int(columns.prefill_tokens[slot]), int(columns.active_blocks[slot]))
            for rank in RANKS
            if (slot := self.fleet.slot_of(rank)) is not None
        }


def _card(worker: WorkerId, incarnation: Epoch) -> WorkerCard:
    return worker_card(worker, incarnation=incarnation, block_size=2, dp_size=2)


class Routers(RuleBasedStateMachine):
    """Three seats for routers, a fleet that each sees in its own time, and a wire that does anything."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 100.0
        self.routers: dict[int, Router] = {}
        self.incarnations: dict[WorkerId, Epoch | None] = {WorkerId(n): Epoch(1) for n in range(WORKERS)}
        self.n_started = 0
        self.n_requests = 0

    # Routers come and go

    @initialize()
    def first_two(self) -> None:
        self.start(0)
        self.start(1)

    @rule(seat=SEAT)
    def start(self, seat: int) -> None:
        if seat in self.routers:
            return
        self.n_started += 1
        router = self.routers[seat] = Router(RouterId(f"router-{self.n_started}"), self.now_s)
        for worker in sorted(self.incarnations, reverse=bool(self.n_started % 2)):
            router.see(worker, self.incarnations[worker])
        self.send(router, StateQuestion(router.id))

    @rule(seat=SEAT, dice=st.integers(0, 7))
    def some_die(self, seat: int, dice: int) -> None:
        if dice < 2:
            self.die(seat, says_goodbye=dice == 0)

    def die(self, seat: int, *, says_goodbye: bool) -> None:
        router = self.routers.pop(seat, None)
        if router is not None and says_goodbye:
            self.send(router, Goodbye(router.id))

    # Requests

    @rule(seat=SEAT, rank=RANK, prompt=PROMPT, tokens=TOKENS, track=st.booleans())
    def book(self, seat: int, rank: WorkerRank, prompt: Prompt, tokens: int, track: bool) -> None:
        router = self.routers.get(seat)
        slot = None if router is None else router.fleet.slot_of(rank)
        if router is None or slot is None:
            return
        self.n_requests += 1
        key = (RequestId(f"request-{self.n_requests // 2}"), self.n_requests % 2)
        router.ledger.ensure_slots(router.fleet.n_slots)
        lease = router.ledger.book(
            key=LeaseKey(router.id, *key), slot=slot, prompt=prompt, prefill_tokens=tokens, track_blocks=track
        )
        router.open[key] = Open(lease, rank, prompt, tokens, track)

    @rule(seat=SEAT, which=st.integers(0, 7), what=st.integers(0, 5), rank=RANK, tokens=TOKENS)
    def go_on(self, seat: int, which: int, what: int, rank: WorkerRank, tokens: int) -> None:
        router = self.routers.get(seat)
        if router is None or not router.open:
            return
        key, opened = list(router.open.items())[which % len(router.open)]
        slot = router.fleet.slot_of(rank)
        if what == 0:
            router.ledger.first_token(opened.lease)
            opened.prefill_tokens = 0
        elif what == 1:
            router.ledger.output_block(opened.lease, 1 + tokens)
            opened.output_blocks += (1 + tokens) * opened.track_blocks
        elif what == 2 and slot is not None:
            router.ledger.ensure_slots(router.fleet.n_slots)  # as every reading before a decision does
            router.ledger.move(opened.lease, slot, tokens)
            opened.rank, opened.prefill_tokens = rank, tokens
        elif what >= 3:
            router.ledger.close(opened.lease)
            del router.open[key]

    # Workers, as each router sees them

    @rule(worker=st.integers(0, WORKERS - 1), is_there=st.booleans())
    def worker_changes(self, worker: int, is_there: bool) -> None:
        old = self.incarnations[WorkerId(worker)]
        self.incarnations[WorkerId(worker)] = Epoch((old or 10 * self.n_started) + 1) if is_there else None

    @rule(seat=SEAT, worker=st.integers(0, WORKERS - 1), flaps=st.booleans())
    def router_sees(self, seat: int, worker: int, flaps: bool) -> None:
        router = self.routers.get(seat)
        if router is not None:
            if flaps:
                router.see(WorkerId(worker), None)
            router.see(WorkerId(worker), self.incarnations[WorkerId(worker)])

    # The wire

    def send(self, router: Router, message: SyncMessage, to: RouterId | None = None) -> None:
        frame = encode_message(message)
        for other in self.routers.values():
            if to in (None, other.id):
                other.mail.letters.append(frame)

    def flush(self, router: Router) -> None:
        for message in router.journal.take():
            self.send(router, message)

    def act(self, router: Router, asks: Asks) -> None:
        for asked in asks.ask:
            self.send(router, StateQuestion(router.id), to=asked)
        for asker in asks.answer:
            self.flush(router)
            for part in router.journal.state():
                self.send(router, part, to=asker)

    def beat(self, router: Router) -> None:
        for message in router.journal.take_heartbeat():
            self.send(router, message)
        self.act(router, router.replicas.tick(now_s=self.now_s))

    def receive(self, router: Router, frame: bytes) -> None:
        self.act(router, router.replicas.on_message(decode_message(frame), now_s=self.now_s))

    @rule(seat=SEAT)
    def some_flush(self, seat: int) -> None:
        if seat in self.routers:
            self.flush(self.routers[seat])

    @rule(seat=SEAT, which=st.integers(0, 20), fate=st.sampled_from(["", "", "", "lost", "twice", "kept"]))
    def some_arrive(self, seat: int, which: int, fate: str) -> None:
        router = self.routers.get(seat)
        if router is None or not router.mail.letters:
            return
        # Mostly in order; a letter may also be lost, come twice, be overtaken, or come again later.
        letters = router.mail.letters
        at = which % len(letters) if fate else 0
        frame = letters[at] if fate == "kept" else letters.pop(at)
        for _ in range({"lost": 0, "twice": 2}.get(fate, 1)):
            self.receive(router, frame)

    @rule()
    def all_arrive(self) -> None:
        for router in self.routers.values():
            self.flush(router)
        while any(router.mail.letters for router in self.routers.values()):
            for router in self.routers.values():
                if router.mail.letters:
                    self.receive(router, router.mail.letters.pop(0))

    @rule(seat=SEAT)
    def one_beats(self, seat: int) -> None:
        if seat in self.routers:
            self.beat(self.routers[seat])

    @rule(seconds=st.sampled_from([0.5, 1.0, 3.0]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    # The law

    def settle(self) -> None:
        """Every router sees the fleet as it is, and a good wire works for longer than a silence."""
        for router in self.routers.values():
            for worker, incarnation in self.incarnations.items():
                router.see(worker, incarnation)
        for _ in range(int(SILENT_AFTER_S) + 4):
            self.now_s += 1.0
            for router in self.routers.values():
                self.beat(router)
            self.all_arrive()

    def truth(self) -> dict[WorkerRank, tuple[int, int]]:
        """The sum of what the living routers run, by the naive ledger, from what the test wrote down."""
        ledger = NaiveLedger(len(RANKS))
        for router in self.routers.values():
            for key, opened in router.open.items():
                lease = ledger.book(
                    key=LeaseKey(router.id, *key),
                    slot=Slot(RANKS.index(opened.rank)),
                    prompt=opened.prompt,
                    prefill_tokens=opened.prefill_tokens,
                    track_blocks=opened.track_blocks,
                )
                ledger.output_block(lease, opened.output_blocks)
        columns = ledger.columns()
        return {
            rank: (int(columns.prefill_tokens[at]), int(columns.active_blocks[at]))
            for at, rank in enumerate(RANKS)
            if self.incarnations[rank.worker_id] is not None
        }

    def teardown(self) -> None:
        self.settle()
        truth = self.truth()
        for router in self.routers.values():
            assert router.loads() == truth
            counts = router.replicas.counts()
            assert (counts.replicas, counts.behind) == (len(self.routers) - 1, 0)
            router.replicas.drop_all()
            for opened in router.open.values():
                router.ledger.close(opened.lease)
            columns = router.ledger.columns()
            assert not np.any(columns.prefill_tokens)
            assert not np.any(columns.active_blocks)
            assert len(router.ledger) == 0


TestRouters = Routers.TestCase
TestRouters.settings = settings(max_examples=250, stateful_step_count=50)


def test_a_dead_router_leaves_no_load_at_other_routers() -> None:
    wire = Routers()
    wire.first_two()
    for seat in (0, 1):
        wire.book(seat, RANKS[0], Prompt([1, 1, 0, 0, 1], block_size=2), 5, True)
    wire.settle()
    assert wire.routers[0].loads()[RANKS[0]] == (10, 4)
    wire.die(1, says_goodbye=False)
    wire.settle()
    assert wire.routers[0].loads()[RANKS[0]] == (5, 3)
    assert wire.routers[0].replicas.counts().lost == 1


def test_dropped_deltas_are_replaced_by_a_state_message() -> None:
    wire = Routers()
    wire.first_two()
    for n in range(40):
        wire.book(0, RANKS[n % len(RANKS)], Prompt([n, n, n], block_size=2), 3, True)
    assert wire.routers[0].journal.dropped > 0
    wire.settle()
    assert wire.routers[1].loads() == wire.routers[0].loads() == wire.truth()
    assert wire.routers[1].replicas.counts().gaps == 1
    assert not any(isinstance(decode_message(frame), Deltas) for frame in wire.routers[1].mail.letters)

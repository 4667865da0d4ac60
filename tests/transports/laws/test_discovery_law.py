"""Whatever a store shows, in whatever order: what a watcher is notified adds up."""

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from kvrouter.core.ids import WorkerId
from kvrouter.core.workers import WorkerCard
from kvrouter.transports.records.card_tracker import CardLeases, Change, Left, claim, still_claims
from kvrouter.transports.records.encoding import CardRecord, decode_record, encode_record
from kvrouter.transports.records.port import Gone
from tests.testing.discovery_stores import card

LEASE_S = 3.0
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("start"), st.integers(0, 1), st.integers(0, 3)),
        st.tuples(st.sampled_from(("renew", "withdraw")), st.integers(0, 1), st.integers(0, 3)),
        st.tuples(st.sampled_from(("wait", "look", "lose", "wipe")), st.just(0), st.integers(1, 9)),
    ),
    max_size=40,
)


@dataclass
class World:
    """A store with the rules of a real one, two worker ids, and one watcher."""

    store: dict[int, tuple[CardRecord, int]] = field(default_factory=dict)
    mine: dict[tuple[int, int], CardRecord] = field(default_factory=dict)
    leases: CardLeases = field(default_factory=CardLeases)
    writes: int = 0
    now: float = 0.0
    heard_at: dict[tuple[int, int], float] = field(default_factory=dict)
    """When the watcher saw the record of an incarnation change, or was asked to restart."""

    seen: dict[int, int] = field(default_factory=dict)
    here: dict[int, WorkerCard] = field(default_factory=dict)
    lapsed: dict[int, WorkerCard] = field(default_factory=dict)

    def write(self, record: CardRecord) -> None:
        self.writes += 1
        self.store[record.card.worker_id] = (decode_record(encode_record(record)), self.writes)

    def start(self, worker: int, incarnation: int) -> None:
        current = self.store.get(worker)
        record = claim(
            card(worker, incarnation),
            LEASE_S,
            None if current is None else current[0],
            self.mine.get((worker, incarnation)),
        )
        if record is not None:
            self.mine[worker, incarnation] = record
            self.write(record)

    def renew(self, worker: int, incarnation: int) -> None:
        mine = self.mine.get((worker, incarnation))
        if mine is None:
            return
        current = self.store.get(worker)
        record = still_claims(mine, None if current is None else current[0])
        if isinstance(record, Gone):
            del self.mine[worker, incarnation]
        else:
            self.mine[worker, incarnation] = record
            self.write(record)

    def withdraw(self, worker: int, incarnation: int) -> None:
        self.mine.pop((worker, incarnation), None)
        current, _ = self.store.get(worker, (None, 0))
        if current is not None and current.card.incarnation == incarnation:
            self.write(CardRecord(current.card, LEASE_S, current.replaced, withdrawn=True))

    def alive(self) -> dict[int, WorkerCard]:
        """Whom the store holds, and who renews."""
        written = {worker: record for worker, (record, _) in self.store.items() if not record.withdrawn}
        return {
            worker: record.card
            for worker, record in written.items()
            if (worker, record.card.incarnation) in self.mine
        }

    def look(self) -> None:
        if self.leases.is_lost:
            self.leases.regain(self.now)
            self.heard_at = dict.fromkeys(self.heard_at, self.now)
        self.leases.check(self.now)
        for worker, (record, stamp) in self.store.items():
            if self.seen.get(worker) != stamp:
                self.heard_at[worker, record.card.incarnation], self.seen[worker] = self.now, stamp
            self.take(self.leases.observe(record, stamp, self.now))
        self.take(self.leases.expire(self.now))
        self.leases.forget({WorkerId(worker) for worker in self.store})

    def take(self, changes: list[Change]) -> None:
        for change in changes:
            worker = int(change.worker_id)
            if not isinstance(change, Left):
                held = self.here.get(worker)
                assert held is None or held.incarnation == change.incarnation
                self.here[worker] = change
                self.lapsed.pop(worker, None)
                continue
            known = self.here.pop(worker, None)
            if change.why is Gone.EXPIRED:
                assert known is not None
                assert self.now - self.heard_at[worker, change.incarnation] >= LEASE_S
                self.lapsed[worker] = known
            else:
                known = known or self.lapsed.pop(worker)
            assert known.incarnation == change.incarnation


@given(STEPS)
def test_watcher_reports_are_consistent_and_end_at_the_store_state(
    steps: list[tuple[str, int, int]],
) -> None:
    world = World()
    for name, worker, number in steps:
        match name:
            case "start":
                world.start(worker, number)
            case "renew":
                world.renew(worker, number)
            case "withdraw":
                world.withdraw(worker, number)
            case "wait":
                world.now += number / 4
            case "look":
                world.look()
            case "lose":
                world.leases.lose()
            case "wipe":
                world.store.clear()
    for tick in range(16):
        world.now += LEASE_S / 4
        for worker, incarnation in tuple(world.mine):
            world.renew(worker, incarnation)
        world.look()
        assert tick < 8 or world.here == world.alive()
    for tick in range(8):
        world.now += LEASE_S / 4
        world.look()
        assert tick < 6 or world.here == {}

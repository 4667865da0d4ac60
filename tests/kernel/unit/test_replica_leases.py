"""Other routers' leases in this one's ledger, step by step; the law over all orders is a property test."""

from msgspec import structs

from kvrouter.core.hashing import Prompt
from kvrouter.core.ids import (
    DpRank,
    Epoch,
    LeaseKey,
    ModelName,
    RequestId,
    RouterId,
    Slot,
    WorkerId,
    WorkerRank,
)
from kvrouter.core.replica_messages import (
    NAMED_BLOCKS_MAX,
    AddRequest,
    Delta,
    Deltas,
    Free,
    Heartbeat,
    MarkPrefillCompleted,
    OutputBlocks,
    StatePart,
    StateQuestion,
)
from kvrouter.kernel.fleet.fleet import Fleet
from kvrouter.kernel.ledger.journal import Journal, SharedLedger, pieces
from kvrouter.kernel.ledger.port import NativeLedger
from kvrouter.kernel.ledger.replicas import BOOKING_DELAY_S, Asks, Replicas
from tests.testing.router_harness import BLOCK_SIZE, MODEL, card

HERE, THERE = RouterId("here"), RouterId("there")
RANK = WorkerRank(WorkerId(7), DpRank(0))


class Here:
    """One router that hears another."""

    def __init__(self) -> None:
        self.less = 0
        self.replicas = Replicas(HERE, silent_after_s=5.0, ask_again_s=1.0, replicas_max=2, leases_max=3)
        self.share(Fleet(MODEL, BLOCK_SIZE), NativeLedger(1))

    def share(self, fleet: Fleet, ledger: NativeLedger) -> None:
        """The model has this fleet and this ledger from now on."""
        self.fleet, self.ledger = fleet, ledger
        self.replicas.share(
            fleet,
            ledger,
            on_load_decrease=self._on_load_decrease,
            before_load_increase=lambda _now_s: None,
            now_s=0.0,
        )

    def _on_load_decrease(self) -> None:
        self.less += 1

    def join(self, worker: int, incarnation: int = 1) -> None:
        change = self.fleet.join(card(worker, incarnation=incarnation))
        for slot in change.freed:
            self.ledger.drop_slot(slot)
        self.replicas.fleet_changed(MODEL, now_s=0.0)

    def leave(self, worker: int, incarnation: int = 1) -> None:
        for slot in self.fleet.leave(WorkerId(worker), Epoch(incarnation)):
            self.ledger.drop_slot(slot)
        self.replicas.fleet_changed(MODEL, now_s=0.0)

    def hear(self, number: int, *deltas: Delta, router: RouterId = THERE, now_s: float = 0.0) -> Asks:
        return self.replicas.on_message(Deltas(router, number, deltas), now_s=now_s)

    def load(self) -> tuple[int, int]:
        slot = self.fleet.slot_of(RANK)
        assert slot is not None
        self.ledger.ensure_slots(self.fleet.n_slots)
        columns = self.ledger.columns()
        return int(columns.prefill_tokens[slot]), int(columns.active_blocks[slot])


def lease(request: str = "r", *, incarnation: int = 1, model: ModelName = MODEL) -> AddRequest:
    prompt = Prompt(range(BLOCK_SIZE * 2 + 1), block_size=BLOCK_SIZE)
    return AddRequest(
        model=model,
        request_id=RequestId(request),
        leg_number=1,
        rank=RANK,
        incarnation=Epoch(incarnation),
        isl_tokens=prompt.isl_tokens,
        block_hashes=prompt.block_hashes,
        prefill_tokens=20,
        track_blocks=True,
    )


def test_a_lease_of_another_router_counts_once_its_rank_joins() -> None:
    here = Here()
    here.hear(1, lease(), OutputBlocks(lease().name, 4))
    assert len(here.ledger) == 0
    here.join(3)
    here.join(7)
    assert here.load() == (20, 7)
    here.hear(2, MarkPrefillCompleted(lease().name), OutputBlocks(lease().name, 6))
    assert here.load() == (0, 9)
    here.hear(3, Free(lease().name))
    assert here.load() == (0, 0)


def test_lease_changes_before_the_rank_joins_are_applied() -> None:
    here = Here()
    here.hear(1, lease(), MarkPrefillCompleted(lease().name))
    here.join(7)
    assert here.load() == (0, 3)


def test_a_new_incarnation_has_none_of_the_old_leases() -> None:
    here = Here()
    here.join(7)
    here.hear(1, lease())
    here.join(7, incarnation=2)
    assert here.load() == (0, 0)
    here.hear(2, lease("late"), lease("new", incarnation=2))
    assert here.load() == (20, 3)
    here.leave(7, incarnation=2)
    here.join(7, incarnation=1)  # discovery had it gone for a moment: it is the same worker
    assert here.load() == (40, 4)


def test_a_lease_that_is_reported_again_has_moved() -> None:
    here = Here()
    here.join(7)
    here.join(8)
    here.hear(1, lease())
    here.hear(2, structs.replace(lease(), rank=WorkerRank(WorkerId(8), DpRank(0)), prefill_tokens=0))
    assert here.load() == (0, 0)
    slot = here.fleet.slot_of(WorkerRank(WorkerId(8), DpRank(0)))
    assert slot is not None
    assert here.ledger.columns().active_blocks[slot] == 3


def test_only_freed_load_of_other_routers_is_signalled() -> None:
    here = Here()
    here.join(7)
    here.hear(1, lease("a"), lease("b"))
    assert here.less == 0
    here.hear(2, Free(lease("a").name), Free(lease("b").name))
    assert here.less == 1


def test_a_gap_is_asked_about_at_intervals_and_closed_by_the_state() -> None:
    here = Here()
    here.join(7)
    assert here.hear(2, lease("b")) == Asks(ask=(THERE,))
    assert here.hear(3, Free(lease("b").name), now_s=0.5) == Asks()
    assert here.load() == (0, 0)
    assert here.hear(5, lease("d"), now_s=1.0) == Asks(ask=(THERE,))
    here.replicas.on_message(StatePart(THERE, 4, 0, 2, (lease("a"),)), now_s=1.1)
    assert here.load() == (0, 0)
    here.replicas.on_message(StatePart(THERE, 4, 1, 2, (lease("c"),)), now_s=1.2)
    assert here.load() == (60, 5)  # a, c, and d, which had waited
    assert here.replicas.counts().behind == 0
    assert here.hear(6, Free(lease("a").name)) == Asks()
    assert here.load() == (40, 4)


def test_a_late_message_closes_a_gap_like_the_state() -> None:
    here = Here()
    here.join(7)
    here.hear(2, Free(lease().name))
    here.hear(1, lease())
    assert here.load() == (0, 0)
    assert here.replicas.counts().behind == 0
    here.replicas.on_message(StatePart(THERE, 1, 0, 1, (lease(),)), now_s=0.0)
    assert here.load() == (0, 0)  # a state of before is no news


def test_an_old_state_does_not_restore_freed_leases() -> None:
    here = Here()
    here.join(7)
    here.hear(1, lease("a"))
    here.hear(2, Free(lease("a").name))
    here.hear(4, lease("b"))
    here.replicas.on_message(StatePart(THERE, 1, 0, 1, (lease("a"),)), now_s=0.0)
    assert here.load() == (0, 0)
    assert here.replicas.counts().behind == 1


def test_a_heartbeat_reveals_missing_deltas_and_a_wrong_count_of_leases() -> None:
    here = Here()
    here.join(7)
    here.hear(1, lease())
    assert here.replicas.on_message(Heartbeat(THERE, 1, 1), now_s=0.0) == Asks()
    assert here.replicas.on_message(Heartbeat(THERE, 2, 0), now_s=0.0) == Asks(ask=(THERE,))
    here.hear(2, Free(lease().name))
    assert here.replicas.on_message(Heartbeat(THERE, 2, 5), now_s=2.0) == Asks(ask=(THERE,))


def test_a_state_question_is_answered_and_makes_its_router_known() -> None:
    here = Here()
    assert here.replicas.on_message(StateQuestion(THERE), now_s=0.0) == Asks(answer=(THERE,))
    assert here.replicas.counts().replicas == 1


def test_a_router_ignores_its_own_messages() -> None:
    here = Here()
    here.join(7)
    here.hear(1, lease(), router=HERE)
    assert here.replicas.counts().replicas == 0
    assert here.load() == (0, 0)


def test_a_silent_routers_leases_are_dropped_and_asked_for_on_return() -> None:
    here = Here()
    here.join(7)
    here.hear(1, lease())
    for now_s in (0.0, 2.0, 4.0):
        here.replicas.tick(now_s=now_s)
        assert here.load() == (20, 3)
    here.replicas.tick(now_s=6.0)
    assert here.load() == (0, 0)
    assert here.replicas.counts().lost == 1
    asked = here.replicas.on_message(Heartbeat(THERE, 9, 1), now_s=7.0)
    assert asked == Asks(ask=(THERE,))


def test_no_router_is_silent_after_a_pause_of_this_process() -> None:
    here = Here()
    here.join(7)
    here.hear(1, lease())
    here.replicas.tick(now_s=0.0)
    here.replicas.tick(now_s=60.0)
    assert here.load() == (20, 3)


def test_replica_routers_and_leases_are_limited() -> None:
    here = Here()
    here.join(7)
    here.hear(1, *(lease(str(n)) for n in range(5)))
    for name in "xyz":
        here.hear(1, router=RouterId(name))
    counts = here.replicas.counts()
    assert (counts.replicas, counts.leases) == (2, 3)
    assert (counts.over_limit, counts.unheard) == (2, 2)


def test_a_lease_with_an_invalid_prompt_is_kept_but_not_booked() -> None:
    here = Here()
    here.join(7)
    here.hear(1, structs.replace(lease(), isl_tokens=3))
    assert here.load() == (0, 0)
    here.hear(2, Free(lease().name))
    assert here.replicas.counts().leases == 0
    assert here.replicas.counts().unusable == 1
    here.share(Fleet(MODEL, BLOCK_SIZE), NativeLedger(1))
    assert here.replicas.counts().unusable == 1, "a model's new ledger forgets nothing"


def test_leases_move_to_a_models_new_ledger() -> None:
    here = Here()
    here.hear(1, lease())
    here.share(Fleet(MODEL, BLOCK_SIZE), NativeLedger(1))
    here.join(7)
    assert here.load() == (20, 3)
    here.hear(2, Free(lease().name))
    assert here.load() == (0, 0)


# What is reported


class There:
    """One router that tells."""

    def __init__(self) -> None:
        self.fleet = Fleet(MODEL, BLOCK_SIZE)
        self.fleet.join(card(7))
        self.fleet.join(card(8))
        self.calls = 0
        self.journal = Journal(THERE, on_pending=self._on_pending, leases_max=2)
        self.ledger = SharedLedger(NativeLedger(4), self.fleet, self.journal)

    def _on_pending(self) -> None:
        self.calls += 1

    def reported(self) -> list[Delta]:
        return [delta for deltas in self.journal.take() for delta in deltas.deltas]


def key(request: str) -> LeaseKey:
    return LeaseKey(THERE, RequestId(request), 1)


def test_each_step_of_a_lease_is_reported_once() -> None:
    there = There()
    prompt = Prompt(range(BLOCK_SIZE * 2 + 1), block_size=BLOCK_SIZE)
    booked = there.ledger.book(key=key("r"), slot=Slot(0), prompt=prompt, prefill_tokens=20)
    there.ledger.first_token(booked)
    there.ledger.first_token(booked)
    there.ledger.output_block(booked, 2)
    there.ledger.move(booked, Slot(0), 0)  # where it is already
    assert there.calls == 1
    assert there.reported() == [lease(), MarkPrefillCompleted(lease().name)]
    there.ledger.output_block(booked)
    *deltas, heartbeat = there.journal.take_heartbeat()
    assert deltas == [Deltas(THERE, 2, (OutputBlocks(lease().name, 3),))]
    assert heartbeat == Heartbeat(THERE, 2, 1)
    there.ledger.move(booked, Slot(1), 5)
    there.ledger.close(booked)
    there.ledger.close(booked)
    moved = structs.replace(
        lease(), rank=WorkerRank(WorkerId(8), DpRank(0)), prefill_tokens=5, output_blocks=3
    )
    assert there.reported() == [moved, Free(lease().name)]
    assert len(there.journal) == len(there.ledger) == 0


def test_reported_leases_name_only_tracked_leading_blocks() -> None:
    there = There()
    long = Prompt(range(BLOCK_SIZE * (NAMED_BLOCKS_MAX + 5)), block_size=BLOCK_SIZE)
    there.ledger.book(key=key("a"), slot=Slot(0), prompt=long, prefill_tokens=1, track_blocks=False)
    there.ledger.book(key=key("b"), slot=Slot(0), prompt=long, prefill_tokens=1)
    first, second = there.reported()
    assert isinstance(first, AddRequest)
    assert isinstance(second, AddRequest)
    assert first.block_hashes == b""
    assert second.block_hashes == long.block_hashes[: 8 * NAMED_BLOCKS_MAX]
    assert second.isl_tokens == long.isl_tokens


def test_leases_over_the_journal_limit_are_not_reported() -> None:
    there = There()
    prompt = Prompt([1], block_size=BLOCK_SIZE)
    booked = [
        there.ledger.book(key=key(name), slot=Slot(0), prompt=prompt, prefill_tokens=1) for name in "abc"
    ]
    for number in booked:
        there.ledger.first_token(number)
        there.ledger.output_block(number)
        there.ledger.move(number, Slot(1), 0)
        there.ledger.close(number)
    assert there.journal.untold == 1
    assert {delta.name if isinstance(delta, AddRequest) else delta.lease for delta in there.reported()} == {
        lease("a").name,
        lease("b").name,
    }


def test_dropping_a_slot_or_a_router_reports_its_leases_as_freed() -> None:
    there = There()
    prompt = Prompt([1], block_size=BLOCK_SIZE)
    for slot, name in enumerate("ab"):
        there.ledger.book(key=key(name), slot=Slot(slot), prompt=prompt, prefill_tokens=1)
    there.reported()
    assert there.ledger.drop_slot(Slot(0)) == 1
    assert there.reported() == [Free(lease("a").name)]
    assert there.ledger.drop_router(THERE) == 1
    assert there.reported() == [Free(lease("b").name)]


def test_the_state_message_has_the_reported_leases() -> None:
    there = There()
    prompt = Prompt(range(BLOCK_SIZE * 2 + 1), block_size=BLOCK_SIZE)
    assert list(there.journal.state()) == [StatePart(THERE, 0, 0, 1, ())]
    there.ledger.book(key=key("r"), slot=Slot(0), prompt=prompt, prefill_tokens=20)
    there.reported()
    assert list(there.journal.state()) == [StatePart(THERE, 1, 0, 1, (lease(),))]


def test_messages_are_split_by_leases_and_by_blocks() -> None:
    long = structs.replace(lease(), block_hashes=bytes(8 * NAMED_BLOCKS_MAX))
    assert [len(piece) for piece in pieces([lease()] * 600)] == [256, 256, 88]
    assert [len(piece) for piece in pieces([long] * 9)] == [4, 4, 1]
    assert list(pieces([])) == []


def test_the_unseen_requests_of_other_routers_follow_their_rate_and_fade() -> None:
    here = Here()
    here.replicas.tick(now_s=1.0)
    here.hear(1, lease("a"), lease("b"), structs.replace(lease("b"), leg_number=0))
    here.replicas.tick(now_s=2.0)
    assert here.replicas.unseen(MODEL) == 1.0 * BOOKING_DELAY_S  # two a second, and none before
    here.replicas.tick(now_s=3.0)
    assert here.replicas.unseen(MODEL) == 0.5 * BOOKING_DELAY_S
    assert here.replicas.unseen(ModelName("other")) == 0.0

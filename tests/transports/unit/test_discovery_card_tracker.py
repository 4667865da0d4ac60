"""What a watcher makes of what it sees in a store, by a clock that the test turns."""

from kvrouter.core.ids import WorkerId
from kvrouter.transports.records.card_tracker import REPLACED_MAX, CardLeases, Left, claim, still_claims
from kvrouter.transports.records.encoding import CardRecord
from kvrouter.transports.records.port import Gone
from tests.testing.discovery_stores import card

LEASE_S = 10.0


def record(incarnation: int = 9, *, replaced: tuple[int, ...] = (), withdrawn: bool = False) -> CardRecord:
    return CardRecord(card(1, incarnation), LEASE_S, replaced, withdrawn=withdrawn)  # type: ignore[arg-type]


def left(why: Gone, incarnation: int = 9) -> Left:
    gone = card(1, incarnation)
    return Left(gone.worker_id, gone.incarnation, why)


def ticks(leases: CardLeases, start: float, end: float) -> list[object]:
    """Look every half second from ``start`` to before ``end``."""
    changes: list[object] = []
    for half in range(int(start * 2), int(end * 2)):
        leases.check(half / 2)
        changes += leases.expire(half / 2)
    return changes


def test_a_lease_runs_from_the_last_change_that_was_seen() -> None:
    leases = CardLeases()
    assert leases.observe(record(), "a", 0.0) == [card()]
    assert leases.observe(record(), "a", 4.0) == []
    assert leases.next_end() == 10.0
    assert leases.observe(record(), "b", 4.0) == []
    assert leases.next_end() == 14.0
    assert ticks(leases, 4.0, 14.0) == []
    assert ticks(leases, 14.0, 15.0) == [left(Gone.EXPIRED)]
    assert leases.next_end() is None


def test_expired_worker_returns_only_with_a_new_stamp() -> None:
    leases = CardLeases()
    leases.observe(record(), "a", 0.0)
    leases.expire(10.0)
    assert leases.observe(record(), "a", 11.0) == []
    assert leases.observe(record(), "b", 12.0) == [card()]


def test_expired_worker_may_still_be_withdrawn_or_replaced() -> None:
    leases = CardLeases()
    leases.observe(record(), "a", 0.0)
    leases.expire(10.0)
    assert leases.observe(record(withdrawn=True), "b", 11.0) == [left(Gone.WITHDRAWN)]
    assert leases.observe(record(withdrawn=True), "c", 12.0) == []
    other = CardLeases()
    other.observe(record(), "a", 0.0)
    other.expire(10.0)
    assert other.observe(record(2, replaced=(9,)), "b", 11.0) == [left(Gone.REPLACED), card(1, 2)]


def test_unseen_withdrawn_start_still_replaces_the_earlier_start() -> None:
    leases = CardLeases()
    leases.observe(record(), "a", 0.0)
    assert leases.observe(record(2, replaced=(9,), withdrawn=True), "b", 1.0) == [left(Gone.REPLACED)]


def test_replaced_start_is_ignored_while_its_replacement_lives() -> None:
    leases = CardLeases()
    leases.observe(record(2, replaced=(9,)), "b", 0.0)
    assert leases.observe(record(), "a", 1.0) == []
    assert leases.observe(record(withdrawn=True), "c", 1.0) == []
    leases.observe(record(2, replaced=(9,), withdrawn=True), "d", 2.0)
    assert leases.observe(record(), "e", 3.0) == [card()]


def test_no_lease_expires_while_store_is_lost_and_all_restart_after() -> None:
    leases = CardLeases()
    leases.observe(record(), "a", 0.0)
    leases.lose()
    assert leases.overdue(100.0) == []
    assert leases.expire(100.0) == []
    leases.regain(100.0)
    assert ticks(leases, 100.0, 110.0) == []
    assert leases.overdue(110.0) == [1]
    assert leases.expire(110.0) == [left(Gone.EXPIRED)]


def test_watcher_that_slept_gives_each_worker_a_full_lease() -> None:
    leases = CardLeases()
    leases.observe(record(), "a", 0.0)
    leases.check(1.0)
    leases.check(60.0)
    assert leases.expire(60.0) == []
    assert ticks(leases, 60.0, 70.0) == []
    assert ticks(leases, 70.0, 70.5) == [left(Gone.EXPIRED)]


def test_ended_start_is_forgotten_once_its_record_is_gone() -> None:
    leases = CardLeases()
    leases.observe(record(), "a", 0.0)
    leases.forget(())
    assert leases.next_end() == 10.0
    leases.expire(10.0)
    leases.forget({WorkerId(1)})
    assert leases.observe(record(), "a", 11.0) == []
    leases.forget(())
    assert leases.observe(record(), "a", 12.0) == [card()]


def test_ended_start_is_forgotten_after_a_time() -> None:
    leases = CardLeases()
    leases.observe(record(), "a", 0.0)
    leases.forget_before(5.0)
    assert len(leases) == 1
    leases.expire(10.0)
    leases.forget_before(0.0)
    assert WorkerId(1) in leases
    leases.forget_before(0.5)
    assert WorkerId(1) not in leases


def test_claim_remembers_a_bounded_number_of_replaced_starts() -> None:
    current = record(0)
    for incarnation in range(1, 40):
        claimed = claim(card(1, incarnation), LEASE_S, current)
        assert claimed is not None
        current = claimed
    assert list(current.replaced) == list(range(38, 38 - REPLACED_MAX, -1))
    assert claim(card(1, 38), LEASE_S, current) is None
    assert claim(card(1, 39, draining=True), LEASE_S, current) == CardRecord(
        card(1, 39, draining=True), LEASE_S, current.replaced
    )


def test_claim_in_an_emptied_store_remembers_replaced_starts() -> None:
    assert claim(card(1, 2), LEASE_S, None, record(2, replaced=(9,))) == record(2, replaced=(9,))
    assert still_claims(record(2, replaced=(9,)), record(9)) == record(2, replaced=(9,))


def test_exactly_one_of_two_simultaneous_starts_keeps_the_claim() -> None:
    first, second = record(1), record(2)
    taken = still_claims(first, second)
    assert taken == record(1, replaced=(2,))
    assert isinstance(taken, CardRecord)
    assert still_claims(second, taken) is Gone.REPLACED


def test_worker_withdrawn_by_another_process_loses_its_claim() -> None:
    assert still_claims(record(), record(withdrawn=True)) is Gone.WITHDRAWN
    assert still_claims(record(), None) == record()

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


def test_what_expired_does_not_come_back_with_its_old_stamp() -> None:
    leases = CardLeases()
    leases.observe(record(), "a", 0.0)
    leases.expire(10.0)
    assert leases.observe(record(), "a", 11.0) == []
    assert leases.observe(record(), "b", 12.0) == [card()]


def test_what_expired_may_still_be_withdrawn_or_replaced() -> None:
    leases = CardLeases()
    leases.observe(record(), "a", 0.0)
    leases.expire(10.0)
    assert leases.observe(record(withdrawn=True), "b", 11.0) == [left(Gone.WITHDRAWN)]
    assert leases.observe(record(withdrawn=True), "c", 12.0) == []
    other = CardLeases()
    other.observe(record(), "a", 0.0)
    other.expire(10.0)
    assert other.observe(record(2, replaced=(9,)), "b", 11.0) == [left(Gone.REPLACED), card(1, 2)]


def test_a_worker_that_came_and_left_between_two_looks_replaced_the_one_before() -> None:
    leases = CardLeases()
    leases.observe(record(), "a", 0.0)
    assert leases.observe(record(2, replaced=(9,), withdrawn=True), "b", 1.0) == [left(Gone.REPLACED)]


def test_what_was_replaced_is_not_heard_again_while_the_other_lives() -> None:
    leases = CardLeases()
    leases.observe(record(2, replaced=(9,)), "b", 0.0)
    assert leases.observe(record(), "a", 1.0) == []
    assert leases.observe(record(withdrawn=True), "c", 1.0) == []
    leases.observe(record(2, replaced=(9,), withdrawn=True), "d", 2.0)
    assert leases.observe(record(), "e", 3.0) == [card()]


def test_nobody_expires_while_the_store_is_lost_and_then_has_a_whole_lease() -> None:
    leases = CardLeases()
    leases.observe(record(), "a", 0.0)
    leases.lose()
    assert leases.overdue(100.0) == []
    assert leases.expire(100.0) == []
    leases.regain(100.0)
    assert ticks(leases, 100.0, 110.0) == []
    assert leases.overdue(110.0) == [1]
    assert leases.expire(110.0) == [left(Gone.EXPIRED)]


def test_a_watcher_that_slept_gives_everybody_a_whole_lease() -> None:
    leases = CardLeases()
    leases.observe(record(), "a", 0.0)
    leases.check(1.0)
    leases.check(60.0)
    assert leases.expire(60.0) == []
    assert ticks(leases, 60.0, 70.0) == []
    assert ticks(leases, 70.0, 70.5) == [left(Gone.EXPIRED)]


def test_the_memory_of_what_is_over_goes_with_its_record() -> None:
    leases = CardLeases()
    leases.observe(record(), "a", 0.0)
    leases.forget(())
    assert leases.next_end() == 10.0
    leases.expire(10.0)
    leases.forget({WorkerId(1)})
    assert leases.observe(record(), "a", 11.0) == []
    leases.forget(())
    assert leases.observe(record(), "a", 12.0) == [card()]


def test_the_memory_of_what_is_over_goes_with_time() -> None:
    leases = CardLeases()
    leases.observe(record(), "a", 0.0)
    leases.forget_before(5.0)
    assert len(leases) == 1
    leases.expire(10.0)
    leases.forget_before(0.0)
    assert WorkerId(1) in leases
    leases.forget_before(0.5)
    assert WorkerId(1) not in leases


def test_a_claim_remembers_whom_it_replaced_and_no_more_than_it_may() -> None:
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


def test_a_claim_in_an_emptied_store_remembers_whom_it_replaced() -> None:
    assert claim(card(1, 2), LEASE_S, None, record(2, replaced=(9,))) == record(2, replaced=(9,))
    assert still_claims(record(2, replaced=(9,)), record(9)) == record(2, replaced=(9,))


def test_of_two_that_started_at_once_exactly_one_keeps_the_place() -> None:
    first, second = record(1), record(2)
    taken = still_claims(first, second)
    assert taken == record(1, replaced=(2,))
    assert isinstance(taken, CardRecord)
    assert still_claims(second, taken) is Gone.REPLACED


def test_a_worker_that_was_withdrawn_by_somebody_else_claims_nothing() -> None:
    assert still_claims(record(), record(withdrawn=True)) is Gone.WITHDRAWN
    assert still_claims(record(), None) == record()

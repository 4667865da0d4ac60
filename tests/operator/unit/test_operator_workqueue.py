"""The workqueue of the controller, and the lease of its leader: decisions without a cluster."""

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.kube.lease import LeaseCandidate, LeaseTimes
from kvrouter.kube.objects import Key, Manifest
from kvrouter.operator.reconcile.workqueue import FIRST_RETRY_S, RETRY_MAX_S, Workqueue

TODAY = datetime(2026, 1, 1, tzinfo=UTC)
PLACE = Key("kvrouter", "operator")


def test_key_added_twice_is_due_once_at_the_earlier_time() -> None:
    backlog = Workqueue[str]()
    backlog.add("a", 5.0)
    backlog.add("a", 2.0)
    backlog.add("a", 9.0)
    assert (len(backlog), backlog.next_due_s()) == (1, 2.0)
    assert backlog.take(1.9) is None
    assert backlog.take(2.0) == "a"
    backlog.done("a")
    assert (backlog.take(99.0), backlog.next_due_s()) == (None, None)


def test_key_added_while_in_work_comes_again_after_it_is_done() -> None:
    backlog = Workqueue[str]()
    backlog.add("a", 0.0)
    assert backlog.take(0.0) == "a"
    backlog.add("a", 1.0)
    assert backlog.take(9.0) is None
    backlog.done("a")
    assert backlog.take(9.0) == "a"


def test_failed_key_is_retried_ever_later_until_it_succeeds() -> None:
    backlog = Workqueue[str]()
    backlog.add("a", 0.0)
    delays_s = []
    now_s = 0.0
    for _ in range(14):
        assert backlog.take(now_s) == "a"
        delays_s.append(backlog.failed("a", now_s))
        assert backlog.take(now_s) is None
        now_s += delays_s[-1]
    assert delays_s[:3] == [FIRST_RETRY_S, 2 * FIRST_RETRY_S, 4 * FIRST_RETRY_S]
    assert delays_s[-1] == RETRY_MAX_S
    assert backlog.take(now_s) == "a"
    backlog.done("a")
    backlog.add("a", now_s)
    assert backlog.take(now_s) == "a"
    assert backlog.failed("a", now_s) == FIRST_RETRY_S


def test_full_workqueue_takes_no_other_key() -> None:
    backlog = Workqueue[str](entries_max=1)
    assert backlog.add("a", 5.0)
    assert not backlog.add("b", 1.0)
    assert backlog.add("a", 2.0)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["add", "take", "done", "failed"]))))
def test_no_added_key_is_missed_or_handed_out_twice_at_a_time(steps: list[tuple[str, str]]) -> None:
    backlog, owed, working = Workqueue[str](), set[str](), set[str]()
    for now, (key, step) in enumerate(steps):
        if step == "add":
            backlog.add(key, now)
            owed.add(key)
        elif step == "take":
            taken = backlog.take(now)
            if taken is not None:
                assert taken not in working
                working.add(taken)
                owed.discard(taken)
        elif key in working:
            working.discard(key)
            if step == "done":
                backlog.done(key)
            else:
                backlog.failed(key, now)
                owed.add(key)
    for key in working:
        backlog.done(key)
    rest = set[str]()
    while (taken := backlog.take(1e9)) is not None:
        rest.add(taken)
    assert rest == owed


def test_lease_is_taken_only_after_its_duration_without_renewal() -> None:
    ours, theirs = (LeaseCandidate(name, PLACE, LeaseTimes()) for name in ("ours", "theirs"))
    first = theirs.claim(None, 0.0, TODAY)
    assert first is not None
    assert ours.claim(first, 100.0, TODAY) is None
    assert ours.claim(first, 114.9, TODAY) is None
    renewed = theirs.claim(first, 10.0, datetime(2026, 1, 2, tzinfo=UTC))
    assert renewed is not None
    assert ours.claim(renewed, 115.0, TODAY) is None
    assert ours.claim(renewed, 129.9, TODAY) is None
    taken = ours.claim(renewed, 130.0, TODAY)
    assert spec(taken)["holderIdentity"] == "ours"
    assert spec(taken)["leaseTransitions"] == 1


def test_lease_released_by_its_holder_alone_is_free_at_once() -> None:
    ours, theirs = (LeaseCandidate(name, PLACE, LeaseTimes()) for name in ("ours", "theirs"))
    held = ours.claim(None, 0.0, TODAY)
    assert theirs.release(held, TODAY) is None
    free = ours.release(held, TODAY)
    assert spec(theirs.claim(free, 0.0, TODAY))["holderIdentity"] == "theirs"


def test_renewal_keeps_the_acquire_time_and_the_resource_version() -> None:
    ours = LeaseCandidate("ours", PLACE, LeaseTimes())
    held = ours.claim(None, 0.0, TODAY)
    assert held is not None
    stored: Manifest = {**held, "metadata": {"name": "operator", "resourceVersion": "7"}}
    renewed = ours.claim(stored, 2.0, datetime(2026, 1, 2, tzinfo=UTC))
    assert renewed is not None
    assert spec(renewed)["acquireTime"] == spec(held)["acquireTime"] != spec(renewed)["renewTime"]
    assert renewed["metadata"] == {"name": "operator", "resourceVersion": "7"}
    assert spec(renewed)["leaseTransitions"] == 0


@pytest.mark.parametrize("times", [(10.0, 10.0, 2.0), (15.0, 2.0, 2.0), (15.0, 10.0, 0.0)])
def test_lease_times_that_let_two_lead_are_refused(times: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match="must fall"):
        LeaseTimes(*times)


def spec(lease: Manifest | None) -> Manifest:
    assert lease is not None
    found = lease["spec"]
    assert isinstance(found, dict)
    return found

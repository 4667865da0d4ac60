"""Whatever is put into an inbox, what it holds stays within its limits."""

from hypothesis import given
from hypothesis import strategies as st

from kvrouter.core.events import KvBatch, Removed, pack_hashes
from kvrouter.core.ids import DpRank, Epoch, EventId, WorkerId, WorkerRank
from kvrouter.kernel.feed.inbox import Added, Inbox

RANK = WorkerRank(WorkerId(7), DpRank(0))
EVENTS_MAX, EPOCHS_MAX, BATCH_MAX = 8, 3, 5


def batch(epoch: int, first: int, n: int) -> KvBatch:
    return KvBatch(RANK, Epoch(epoch), EventId(first), (Removed(pack_hashes([1])),) * n)


def drain(inbox: Inbox) -> int:
    """Take everything out, and return how many events that were."""
    n_events = 0
    for epoch in inbox.epochs:
        while (first := inbox.first_id(epoch)) is not None:
            n_events += len(inbox.take_run(epoch, first).events)
    assert not inbox
    return n_events


BATCHES = st.builds(batch, st.integers(0, 5), st.integers(0, 40), st.integers(0, BATCH_MAX))


@given(st.lists(BATCHES, max_size=60))
def test_an_inbox_stays_within_its_bounds_and_reports_being_full(batches: list[KvBatch]) -> None:
    inbox = Inbox(events_max=EVENTS_MAX, epochs_max=EPOCHS_MAX)
    added = [inbox.add(batch, ticket=0) for batch in batches]
    assert len(inbox.epochs) <= EPOCHS_MAX
    # A batch is never cut: when full, the newest of each of the epochs that are kept apart stays.
    n_events = drain(inbox)
    assert n_events <= max(EVENTS_MAX, EPOCHS_MAX * BATCH_MAX)
    if Added.KEPT_AND_FULL not in added:
        assert n_events <= EVENTS_MAX

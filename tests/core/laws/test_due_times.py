"""Whatever is put off, dropped or taken: what is due by now comes, once, the earliest first."""

from math import inf

from hypothesis import given
from hypothesis import strategies as st

from kvrouter.core.clock import DueTimes

SUBJECTS = st.integers(0, 5)
MOMENTS = st.integers(0, 50)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("put"), SUBJECTS, MOMENTS),
            st.tuples(st.just("drop"), SUBJECTS, st.just(0)),
            st.tuples(st.just("take"), st.just(0), MOMENTS),
            st.tuples(st.just("take first"), st.just(0), MOMENTS),
        ),
        max_size=400,
    )
)
def test_due_subjects_are_returned_once_in_order(deeds: list[tuple[str, int, int]]) -> None:
    due: DueTimes[int] = DueTimes()
    known: dict[int, float] = {}
    for deed, subject, at_s in deeds:
        if deed == "put":
            due.put(subject, at_s)
            known[subject] = at_s
        elif deed == "drop":
            due.drop(subject)
            known.pop(subject, None)
        elif deed == "take first":
            first = due.take_first(at_s)
            soonest_s = min(known.values(), default=inf)
            assert (first is not None) == (soonest_s <= at_s)
            assert first is None or known.pop(first) == soonest_s
        else:
            taken = due.take(at_s)
            assert sorted(taken) == sorted(each for each, due_s in known.items() if due_s <= at_s)
            moments = [known.pop(each) for each in taken]
            assert moments == sorted(moments)
        assert due.next_s <= min(known.values(), default=inf)
        assert due.waiting == len(known)
        assert all(due.due_s(each) == known.get(each, inf) for each in range(6))


def test_postponed_entries_do_not_fill_memory() -> None:
    due: DueTimes[str] = DueTimes()
    for at_s in range(1000, 0, -1):
        due.put("always sooner", at_s)
    assert due.next_s == 1
    assert len(due) < 100, "moments that it was due before are let go"
    assert due.take(1000.0) == ["always sooner"]
    assert due.next_s == inf

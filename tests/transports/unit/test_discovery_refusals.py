"""What holds no card is reported once, however many watches see it, and whichever is behind."""

import pytest

from kvrouter.transports.records import card_tracker
from kvrouter.transports.records.card_tracker import StoreRefusals
from tests.testing.constants import SetConstants


@pytest.fixture
def reported() -> list[str]:
    return []


@pytest.fixture
def made(reported: list[str]) -> StoreRefusals:
    return StoreRefusals(lambda what, _: reported.append(what))


def test_bad_entry_is_reported_once_until_it_is_forgotten(made: StoreRefusals, reported: list[str]) -> None:
    for _ in range(2):
        made.report("a", "a", "why")
        made.report("a", "a", "why")
        made.forget("a")
    assert reported == ["a", "a"]


def test_watch_that_is_behind_does_not_repeat_a_report(made: StoreRefusals, reported: list[str]) -> None:
    made.report("a", "a", "why", version=2)
    made.forget("a", version=3)
    made.report("a", "a", "why", version=2)
    assert reported == ["a"]
    made.report("a", "a", "why", version=4)
    made.forget("a", version=3)
    made.report("a", "a", "why", version=4)
    assert reported == ["a", "a"]


def test_number_of_remembered_refusals_is_bounded(
    made: StoreRefusals, reported: list[str], set_constants: SetConstants
) -> None:
    set_constants(card_tracker, REFUSALS_MAX=2)
    for key in "abc":
        made.report(key, key, "why", version=1)
    assert reported == ["a", "b"]
    for key in "abc":
        made.forget(key, version=2)
        made.report(key, key, "why", version=3)
        made.forget(key, version=4)
    made.report("a", "a", "why", version=3)
    assert reported == ["a", "b", "a", "b", "c", "a"]

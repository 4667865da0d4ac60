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


def test_it_is_reported_once_until_it_holds_a_card(made: StoreRefusals, reported: list[str]) -> None:
    for _ in range(2):
        made.report("a", "a", "why")
        made.report("a", "a", "why")
        made.forget("a")
    assert reported == ["a", "a"]


def test_a_watch_that_is_behind_tells_nothing_again(made: StoreRefusals, reported: list[str]) -> None:
    made.report("a", "a", "why", version=2)
    made.forget("a", version=3)
    made.report("a", "a", "why", version=2)
    assert reported == ["a"]
    made.report("a", "a", "why", version=4)
    made.forget("a", version=3)
    made.report("a", "a", "why", version=4)
    assert reported == ["a", "a"]


def test_no_more_is_remembered_than_the_limit(
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

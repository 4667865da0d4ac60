"""What routers say to each other of links: what is refused, what is kept of much, and what is counted."""

import math
from collections import defaultdict

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.core.errors import ProtocolError
from kvrouter.core.ids import RouterId
from kvrouter.core.sync import LINK_NEWS_MAX, LinkName, LinkNews, LinkUse
from kvrouter.fleet import Fleet
from kvrouter.placement.link_journal import LinkJournal, OnLink
from kvrouter.placement.transfers import NEWS_LASTS_S, Transfers
from kvrouter.topology import LinkLoad, LinkTable, SharedLink
from kvrouter.transports.sync.nats import decode_message
from tests.support.fleets import BLOCK_SIZE, MODEL
from tests.support.placements import SpeedEvents

HERE = RouterId("here")
TABLE = LinkTable()


def link(number: int) -> SharedLink:
    return SharedLink((("zone", str(number)),), "far")


def transfers() -> Transfers:
    made = Transfers(Fleet(MODEL, BLOCK_SIZE), SpeedEvents(), TABLE, HERE)
    made.begin_sharing()
    return made


def frame(*amounts: float, digest: str = "d", uses: object = None) -> bytes:
    """A message about links as a stranger would write it."""
    seen = ["a", 1, [[["zone", "a"]], "b"], *amounts]
    return msgspec.msgpack.encode([6, "a", MODEL, digest, [seen], uses])


def test_a_message_of_amounts_is_read() -> None:
    assert isinstance(decode_message(frame(1.0, 1.0, 1.0, 1.0, 1.0)), LinkNews)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -1.0])
@pytest.mark.parametrize("at", range(5))
def test_amounts_that_are_none_are_refused(wrong: float, at: int) -> None:
    amounts = [1.0] * 5
    amounts[at] = wrong
    with pytest.raises(ProtocolError):
        decode_message(frame(*amounts))


@pytest.mark.parametrize(
    "message",
    [
        frame(1.0, 0.0, 1.0, 1.0, 1.0),
        frame(1.0, 1.0, 1.0, 1.0, 1.0, uses=[[[[], "b"], 1.0, 1.0, 1.0, 1.0]]),
        frame(1.0, 1.0, 1.0, 1.0, 1.0, uses=[[[[["zone", "a"]], "b"], 1.0, 1.0, math.nan, 1.0]]),
        frame(1.0, 1.0, 1.0, 1.0, 1.0, digest="d" * 65),
        frame(1.0, 1.0, 1.0, 1.0),
    ],
)
def test_links_that_are_none_are_refused(message: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_message(message)


def test_a_journal_says_the_mean_of_its_looks_and_of_too_many_links_those_with_most_bytes() -> None:
    journal = LinkJournal()
    assert journal.take_uses() is None
    journal.look([OnLink(link(n), LinkLoad(float(n), 1.0), LinkLoad(0.0, 0.0)) for n in range(100)])
    journal.look([])
    uses = journal.take_uses()
    assert uses is not None
    assert [use.bytes for use in uses] == [n / 2 for n in range(99, 99 - LINK_NEWS_MAX, -1)]
    assert {use.transfers for use in uses} == {0.5}
    assert journal.take_uses() == (), "that nothing is there any more is said once"
    assert journal.take_uses() is None


def test_what_a_router_put_on_links_counts_no_longer_when_it_falls_silent() -> None:
    here = transfers()
    use = LinkUse(LinkName(*link(1)), 5.0, 1.0, 0.0, 0.0)
    here.on_news(LinkNews(RouterId("a"), MODEL, TABLE.digest(), (), (use,)), now_s=10.0)
    assert here.take_news(HERE, now_s=10.0 + NEWS_LASTS_S) is None
    assert here.state.on(link(1)) == LinkLoad(5.0, 1.0)
    here.take_news(HERE, now_s=10.1 + NEWS_LASTS_S)
    assert here.state.on(link(1)) == LinkLoad(0.0, 0)
    assert len(here.state) == 0


WORDS = st.lists(
    st.one_of(
        st.tuples(st.integers(0, 3), st.none()),
        st.tuples(st.integers(0, 3), st.dictionaries(st.integers(0, 3), st.integers(1, 9), max_size=3)),
    ),
    max_size=12,
)


@given(WORDS)
def test_each_link_carries_what_each_router_said_last(words: list[tuple[int, dict[int, int] | None]]) -> None:
    here = transfers()
    here.state.add(link(0), 100.0)
    said: dict[int, dict[int, int]] = {}
    for router, uses in words:
        if uses is None:
            said.pop(router, None)
            here.router_gone(RouterId(str(router)))
            continue
        said[router] = uses
        uses_said = tuple(
            LinkUse(LinkName(*link(n)), float(kv_bytes), 1.0, 0.0, 0.0) for n, kv_bytes in uses.items()
        )
        here.on_news(LinkNews(RouterId(str(router)), MODEL, TABLE.digest(), (), uses_said), now_s=0.0)
    totals: defaultdict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    totals[0] = [100.0, 1.0]
    for uses in said.values():
        for n, kv_bytes in uses.items():
            totals[n][0] += kv_bytes
            totals[n][1] += 1
    for n in range(4):
        assert here.state.on(link(n)) == LinkLoad(*totals[n])
    assert dict(here.state.loads()) == {
        link(n): LinkLoad(*total) for n, total in totals.items() if total[1] > 0
    }

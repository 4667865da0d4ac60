"""Link updates between routers: validation, limits, and link loads."""

import math
from collections import defaultdict

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.core.errors import ProtocolError
from kvrouter.core.ids import RouterId
from kvrouter.core.replica_messages import LINK_UPDATE_MAX, LinkName, LinkSample, LinkUpdate, LinkUse
from kvrouter.kernel.fleet.fleet import Fleet
from kvrouter.kernel.ledger.link_exchange import LinkExchange
from kvrouter.kernel.placement.link_journal import LinkJournal, LinkTraffic, as_sample
from kvrouter.kernel.placement.link_speeds import KINDS_MAX
from kvrouter.kernel.placement.transfers import UPDATE_LASTS_S, Transfers
from kvrouter.kernel.topology.link_table import ACROSS_LINK, Link, LinkLoad, LinkTable, SharedLink
from kvrouter.transports.sync.nats import decode_message
from tests.testing.placement_events import RecordedPlacementEvents
from tests.testing.router_harness import BLOCK_SIZE, MODEL

HERE = RouterId("here")
TABLE = LinkTable(by_level={"zone": ACROSS_LINK})


def link(number: int) -> SharedLink:
    return SharedLink((("zone", str(number)),), "far")


def transfers() -> Transfers:
    made = Transfers(Fleet(MODEL, BLOCK_SIZE), RecordedPlacementEvents(), TABLE, HERE)
    made.begin_sharing()
    return made


def frame(*amounts: float, digest: str = "d", uses: object = None) -> bytes:
    """A message about links as a stranger would write it."""
    seen = ["a", 1, [[["zone", "a"]], "b"], *amounts]
    return msgspec.msgpack.encode([6, "a", MODEL, digest, [seen], uses])


def test_a_link_update_with_valid_amounts_is_decoded() -> None:
    assert isinstance(decode_message(frame(1.0, 1.0, 1.0, 1.0, 1.0)), LinkUpdate)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -1.0, 1e300])
@pytest.mark.parametrize("at", range(5))
def test_a_link_update_with_an_invalid_amount_is_refused(wrong: float, at: int) -> None:
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
def test_a_link_update_with_an_invalid_link_is_refused(message: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_message(message)


def test_a_journal_reports_mean_loads_of_the_links_with_the_most_bytes() -> None:
    journal = LinkJournal()
    assert journal.take_uses() is None
    journal.sample_loads(
        [LinkTraffic(link(n), LinkLoad(float(n), 1.0), LinkLoad(0.0, 0.0)) for n in range(100)]
    )
    journal.sample_loads([])
    uses = journal.take_uses()
    assert uses is not None
    assert [use.bytes for use in uses] == [n / 2 for n in range(99, 99 - LINK_UPDATE_MAX, -1)]
    assert {use.transfers for use in uses} == {0.5}
    assert journal.take_uses() == (), "that nothing is there any more is said once"
    assert journal.take_uses() is None


def history(n: int, kind: int = 0) -> tuple[LinkSample, ...]:
    """Transfers of different lengths over one link, ten times as long as by the table."""
    name = LinkName(((f"level-{kind}", "a"),), "b")
    return tuple(
        LinkSample(
            RouterId("a"), kind * 1000 + at, name, 0.0, 1e9, float(n - at), 0.1 + at % 7, 1.0 + 10 * (at % 7)
        )
        for at in range(n)
    )


def test_a_history_that_arrives_at_once_is_learned_completely() -> None:
    here = transfers()
    here.on_link_update(LinkUpdate(RouterId("a"), MODEL, TABLE.digest(), history(64)), now_s=1000.0)
    assert len(here.learned.samples()) == 64
    (reading,) = here.learned.readings()
    assert reading.slowness == pytest.approx(10.0, rel=0.01)


def test_learned_kinds_of_links_are_limited() -> None:
    here = transfers()
    for kind in range(3 * KINDS_MAX):
        here.on_link_update(LinkUpdate(RouterId("a"), MODEL, TABLE.digest(), history(4, kind)), now_s=1000.0)
    assert len(here.learned.readings()) == KINDS_MAX
    assert len(here.learned.samples()) == 4 * KINDS_MAX


def test_a_router_without_decisions_still_reports_its_link_loads() -> None:
    here = transfers()
    here.state.add(link(1), 5.0)
    for at_s in (1.0, 2.0):
        news = here.take_update(HERE, now_s=at_s)
        assert news is not None
        assert news.uses == (LinkUse(LinkName(*link(1)), 5.0, 1.0, 0.0, 0.0),)


def test_samples_of_an_old_link_table_are_not_sent_under_the_new_table() -> None:
    here = transfers()
    assert here._journal is not None
    here._journal.record(as_sample(history(1)[0], now_s=1.0))
    here.use(LinkTable({"zone": Link(1.0, 1.0)}))
    assert here.take_update(HERE, now_s=1.0) is None


def test_link_updates_before_a_model_is_shared_are_learned_then() -> None:
    here, exchange = transfers(), LinkExchange(HERE)
    exchange.on_link_update(LinkUpdate(RouterId("a"), MODEL, TABLE.digest(), history(8)), now_s=500.0)
    exchange.share(MODEL, here)
    assert {seen.at_s for seen in here.learned.samples()} == {500.0 - age for age in range(1, 9)}
    exchange.forget(MODEL)
    exchange.share(MODEL, other := transfers())
    assert other.learned.samples() == []


def test_link_loads_of_a_silent_router_are_dropped() -> None:
    here = transfers()
    use = LinkUse(LinkName(*link(1)), 5.0, 1.0, 0.0, 0.0)
    here.on_link_update(LinkUpdate(RouterId("a"), MODEL, TABLE.digest(), (), (use,)), now_s=10.0)
    assert here.take_update(HERE, now_s=10.0 + UPDATE_LASTS_S) is None
    assert here.state.on(link(1)) == LinkLoad(5.0, 1.0)
    here.take_update(HERE, now_s=10.1 + UPDATE_LASTS_S)
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
def test_each_link_has_the_last_reported_load_of_each_router(
    words: list[tuple[int, dict[int, int] | None]],
) -> None:
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
        here.on_link_update(
            LinkUpdate(RouterId(str(router)), MODEL, TABLE.digest(), (), uses_said), now_s=0.0
        )
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

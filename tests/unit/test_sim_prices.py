"""What KV transfers cost, by the prices of links."""

from math import inf, nan

import pytest

from kvrouter.config import FleetFile
from kvrouter.core.errors import ConfigError
from kvrouter.mock import DomainPair
from kvrouter.sim.prices import prices_of
from kvrouter.sim.summary import Objective, Summary, summarize
from kvrouter.topology import Link
from tests.support.replays import TWO_ZONES, fleet, replayed, row

GB = 10**9
KV_BYTES = 192 * 131_072


def priced(within: str = "", across: str = "", pairs: str = "") -> FleetFile:
    """Two zones with prices on some links."""
    text = TWO_ZONES.replace("13107200.0}}", f"13107200.0{within}}}}}").replace(
        " 1310720.0}", f" 1310720.0{across}}}"
    )
    if pairs:
        text = text.replace(
            "workers:",
            f"    pairs: [{{level: zone, latency_s: 0.0, bandwidth_bytes_per_s: 1.0e6, {pairs}}}]\nworkers:",
        )
    return fleet(f"kv_transfer: {{domain: zone, enforcement: fallback}}{text}")


def figures(file: FleetFile) -> Summary:
    return summarize(replayed([row(0, 0.0, [1, 2, 3])], file), Objective(), prices_of(file))


def test_without_a_price_nothing_has_a_cost() -> None:
    assert prices_of(priced()) is None
    summary = figures(priced())
    assert (summary.cost, [pair.cost for pair in summary.carried]) == (None, [None])


def test_a_transfer_costs_what_its_link_does_also_within_a_domain() -> None:
    summary = figures(priced(within=", price_per_gb: 0.5"))
    (pair,) = summary.carried
    assert (pair.src, pair.bytes) == (pair.dst, KV_BYTES)
    assert pair.cost == summary.cost == pytest.approx(0.5 * KV_BYTES / GB)


def test_links_without_a_price_add_nothing_and_those_that_are_not_used_cost_nothing() -> None:
    summary = figures(priced(across=", price_per_gb: 0.02"))
    assert ([pair.cost for pair in summary.carried], summary.cost) == ([None], 0)


def test_the_price_of_a_pair_wins_in_either_direction() -> None:
    prices = prices_of(
        priced(", price_per_gb: 0", ", price_per_gb: 0.02", "between: [b, a], price_per_gb: 0.09")
    )
    assert prices is not None
    assert prices.cost(DomainPair("a", "a"), GB) == 0.0
    assert prices.cost(DomainPair("a", "b"), GB) == prices.cost(DomainPair("b", "a"), GB) == 0.09
    assert prices.cost(DomainPair("a", "c"), GB) == 0.02


@pytest.mark.parametrize(
    ("price", "must"),
    [("-1", "must be ≥ 0, not -1"), (".nan", "must be a finite number"), ("cheap", "must be a number")],
)
def test_a_price_that_is_none_is_named_with_its_line(price: str, must: str) -> None:
    with pytest.raises(ConfigError, match=r"fleet.yaml:\d+: topology.links.across.price_per_gb") as wrong:
        priced(across=f", price_per_gb: {price}")
    assert must in wrong.value.message


@pytest.mark.parametrize("price", [-0.01, nan, inf])
def test_a_link_takes_no_price_below_nothing(price: float) -> None:
    with pytest.raises(ConfigError, match="price_per_gb: "):
        Link(0.0, 1.0, price)

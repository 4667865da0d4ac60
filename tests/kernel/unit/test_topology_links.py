from math import inf, nan

import pytest

from kvrouter.core.errors import ConfigError
from kvrouter.kernel.topology.link_table import (
    ACROSS_LINK,
    NO_SHARED_LEVEL,
    Distance,
    Link,
    LinkTable,
    distance,
)

LEVELS = ("zone", "rack", "host")


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ({"zone": "a", "rack": "1", "host": "x"}, {"zone": "a", "rack": "1", "host": "x"}, ("host", 3)),
        ({"zone": "a", "rack": "1", "host": "x"}, {"zone": "a", "rack": "1", "host": "y"}, ("rack", 2)),
        ({"zone": "a", "rack": "1"}, {"zone": "a", "rack": "2"}, ("zone", 1)),
        ({"zone": "a"}, {"zone": "b"}, (None, 0)),
        ({}, {"zone": "b"}, (None, 0)),
        # rack-1 of another zone is another rack
        ({"zone": "a", "rack": "1"}, {"zone": "b", "rack": "1"}, (None, 0)),
        # a level that one of them does not publish is passed over
        ({"zone": "a", "host": "x"}, {"zone": "a", "rack": "1", "host": "x"}, ("host", 3)),
        ({"rack": "1"}, {"zone": "a", "rack": "1"}, ("rack", 2)),
    ],
)
def test_distance_is_the_narrowest_shared_level(
    a: dict[str, str], b: dict[str, str], expected: tuple[str | None, int]
) -> None:
    assert distance(a, b, LEVELS) == Distance(*expected)
    assert distance(b, a, LEVELS) == Distance(*expected)


def test_workers_share_no_level_if_no_levels_are_given() -> None:
    assert distance({"zone": "a"}, {"zone": "a"}, ()) == NO_SHARED_LEVEL


def test_a_transfer_takes_latency_plus_bytes_over_bandwidth() -> None:
    assert Link(0.5, 100.0).transfer_s(200.0) == 2.5


def test_the_narrowest_shared_level_gives_the_link() -> None:
    host, rack, zone = Link(0.1, 4.0), Link(0.2, 3.0), Link(0.3, 2.0)
    table = LinkTable(by_level={"host": host, "zone": zone, "rack": rack})
    here = {"zone": "a", "rack": "1", "host": "x"}
    others = [
        here,
        {"zone": "a", "rack": "1", "host": "y"},
        {"zone": "a", "rack": "2", "host": "z"},
        {"zone": "b", "rack": "3", "host": "w"},
    ]
    assert [table.link(here, other, LEVELS) for other in others] == [host, rack, zone, ACROSS_LINK]


def test_a_measured_pair_wins_in_either_direction() -> None:
    slow = Link(1.0, 1e6)
    near = Link(0.0005, 12.5e9)
    table = LinkTable(by_level={"zone": near}, pairs={("zone", "a", "b"): slow})
    assert table.link({"zone": "a"}, {"zone": "b"}, LEVELS) is slow
    assert table.link({"zone": "b"}, {"zone": "a"}, LEVELS) is slow
    assert table.link({"zone": "a"}, {"zone": "a"}, LEVELS) is near
    assert table.link({"zone": "a"}, {"zone": "c"}, LEVELS) is table.otherwise


def test_a_level_without_a_link_uses_the_next_broader_level() -> None:
    zone = Link(0.1, 1e9)
    table = LinkTable(by_level={"zone": zone})
    assert table.link({"zone": "a", "rack": "1"}, {"zone": "a", "rack": "1"}, LEVELS) is zone


@pytest.mark.parametrize(
    ("latency_s", "bandwidth", "field"),
    [(-1.0, 1.0, "latency_s"), (nan, 1.0, "latency_s"), (0.0, 0.0, "bandwidth"), (0.0, inf, "bandwidth")],
)
def test_an_invalid_link_is_refused_by_name(latency_s: float, bandwidth: float, field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        Link(latency_s, bandwidth)

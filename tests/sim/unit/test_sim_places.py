"""What KV transfers cost, by the prices of links."""

from collections import Counter
from collections.abc import Sequence
from math import inf, nan
from pathlib import Path

import pytest

from kvrouter.core.errors import ConfigError
from kvrouter.fleetfile.fleet_file import FleetFile
from kvrouter.kernel.topology.link_table import Link
from kvrouter.sim.replay.carriage import Moved, Places
from kvrouter.sim.replay.outcome import Move, Outcome
from kvrouter.sim.replay.outcomes import Outcomes
from kvrouter.sim.replay.simulation import Result
from kvrouter.sim.replay.summary import Carriage, Objective, Summary, summarize
from kvrouter.sim.replay.timetable import read_timetable
from kvrouter.sim.traces.trace_request import TraceRequest
from tests.testing.replays import TWO_ZONES, fleet, replayed, row

GB = 10**9
KV_BYTES = 192 * 131_072


PRICED_ZONES = """topology:
  levels: [zone, rack]
  links:
    within:
      zone: {latency_s: 0.0, bandwidth_bytes_per_s: 1.0e9, price_per_gb: 0.5}
      rack: {latency_s: 0.0, bandwidth_bytes_per_s: 1.0e9}
workers: [{name: w}]
"""


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
    return figures_of([row(0, 0.0, [1, 2, 3])], file)


def figures_of(rows: Sequence[TraceRequest], file: FleetFile) -> Summary:
    return summarize(replayed(rows, file), Objective(), Places(file))


def test_replay_without_prices_has_no_costs() -> None:
    assert not Places(priced()).has_prices
    summary = figures(priced())
    assert (summary.cost, [pair.cost for pair in summary.carried]) == (None, [None])


def test_transfer_costs_its_links_price_also_within_a_domain() -> None:
    summary = figures(priced(within=", price_per_gb: 0.5"))
    (pair,) = summary.carried
    assert (pair.src, pair.bytes) == (pair.dst, KV_BYTES)
    assert pair.cost == summary.cost == pytest.approx(0.5 * KV_BYTES / GB)


def test_unpriced_and_unused_links_add_no_cost() -> None:
    summary = figures(priced(across=", price_per_gb: 0.02"))
    assert ([pair.cost for pair in summary.carried], summary.cost) == ([None], 0)


def test_price_of_a_domain_pair_wins_in_either_direction() -> None:
    file = priced(", price_per_gb: 0", ", price_per_gb: 0.02", "between: [b, a], price_per_gb: 0.09")
    places = Places(file)

    def moved(src: str, dst: str) -> Moved:
        return places.moved(Move({"zone": src}, {"zone": dst}, GB))

    assert moved("a", "b") == ("a", "b", 0.09)
    assert moved("b", "a") == ("b", "a", 0.09)
    assert (moved("a", "a").cost, moved("a", "c").cost) == (0.0, 0.02)
    assert (moved("a", "a").crosses, moved("a", "c").crosses) == (False, True)


def test_price_is_that_of_the_link_whatever_level_is_reported() -> None:
    file = fleet(PRICED_ZONES)
    here, far = {"zone": "a", "rack": "r1"}, {"zone": "a", "rack": "r2"}
    places = Places(file)
    assert places.level == "zone"
    assert places.moved(Move(here, here, GB)) == ("a", "a", None)
    assert places.moved(Move(here, far, GB)) == ("a", "a", 0.5)
    assert Places(file, "rack").moved(Move(here, far, GB)) == ("r1", "r2", 0.5)


def test_moves_of_requests_add_up_to_the_bytes_links_carried() -> None:
    rows = [row(n, 0.1 * n, [n % 3, n % 2, n], output_tokens=40) for n in range(20)]
    file = fleet(TWO_ZONES.replace("1310720.0", "13107200.0"))
    result = replayed(rows, file)
    places = Places(file)
    found: Counter[tuple[str, str]] = Counter()
    for move in (move for outcome in result.outcomes for move in outcome.moves):
        moved = places.moved(move)
        found[moved.src, moved.dst] += move.bytes
    carried = {tuple(pair): each.arrived_bytes for pair, each in result.carried.items()}
    assert found == carried
    assert len(carried) > 1


def test_transfers_bytes_and_costs_of_the_parts_add_up_to_the_whole() -> None:
    rows = [row(n, 2.0 * n, [n % 3, n % 2, n], output_tokens=40) for n in range(20)]
    file = priced(within=", price_per_gb: 1", across=", price_per_gb: 20")
    far = file.model_copy(update={"kv_transfer": None})
    for each in (file, far):
        summary = figures_of(rows, each)
        parts = [pair for part in summary.parts for pair in part.carried]
        assert len([part for part in summary.parts if part.carried]) > 5
        for total in summary.carried:
            own = [pair for pair in parts if (pair.src, pair.dst) == (total.src, total.dst)]
            assert sum(pair.transfers for pair in own) == total.transfers
            assert sum(pair.bytes for pair in own) == total.bytes
            assert sum(pair.cost or 0.0 for pair in own) == pytest.approx(total.cost)
    assert all(not part.carried for part in summarize(replayed(rows, file), Objective()).parts)


def test_transfers_within_one_domain_are_summed_at_their_own_links_prices() -> None:
    file = fleet(PRICED_ZONES)
    one, two, three = ({"zone": "a", "rack": rack} for rack in ("r1", "r2", "r3"))
    moves = [Move(one, two, GB), Move(two, three, 2 * GB), Move(one, one, 4 * GB), Move(one, two, GB)]
    ended = Outcome(number=0, arrived_s=0.0, input_tokens=1, output_tokens=1, ceiling_tokens=0, moves=moves)
    (part, *_) = summarize(Result(Outcomes([ended])), Objective(), Places(file)).parts
    assert part.carried == (Carriage("a", "a", 4, 8 * GB, 2.0),)


def test_each_attempt_of_a_request_moves_its_own_kv(tmp_path: Path) -> None:
    rows = [row(0, 0.0, [1, 2, 3], output_tokens=2_000)]
    file = priced(within=", price_per_gb: 1", across=", price_per_gb: 2")
    (first,) = replayed(rows, file).outcomes
    home = file.workers[(first.decode or 0) - 1].name
    events = tmp_path / "events.yaml"
    events.write_text(f"events: [{{at_s: 6, what: die, group: {home}}}]")
    result = replayed(rows, file, timetable=read_timetable(events))
    (outcome,) = result.outcomes
    assert (outcome.error, outcome.attempts, len(outcome.moves)) == ("", 2, 2)
    one, other = outcome.moves
    assert (one.src, one.dst, one.bytes) == (one.src, one.src, KV_BYTES)
    assert other.bytes > KV_BYTES
    places = Places(file)
    cost = sum(places.moved(move).cost or 0.0 for move in outcome.moves)
    assert summarize(result, Objective(), places).cost == pytest.approx(cost)


@pytest.mark.parametrize(
    ("price", "must"),
    [("-1", "must be ≥ 0, not -1"), (".nan", "must be a finite number"), ("cheap", "must be a number")],
)
def test_invalid_price_is_refused_with_its_line(price: str, must: str) -> None:
    with pytest.raises(ConfigError, match=r"fleet.yaml:\d+: topology.links.across.price_per_gb") as wrong:
        priced(across=f", price_per_gb: {price}")
    assert must in wrong.value.message


@pytest.mark.parametrize("price", [-0.01, nan, inf])
def test_link_refuses_a_negative_or_infinite_price(price: float) -> None:
    with pytest.raises(ConfigError, match="price_per_gb: "):
        Link(0.0, 1.0, price)

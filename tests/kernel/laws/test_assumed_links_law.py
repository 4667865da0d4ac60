"""The law of assumed links: without a policy and without links, where workers are has no effect."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from kvrouter.core.constraints import PdSelection
from kvrouter.core.workers import Role
from kvrouter.fleetfile.fleet_file import LinkSpec, LinksSpec, TopologySpec
from kvrouter.fleetfile.fleet_workers import table_of, table_of_links
from kvrouter.kernel.fleet.fleet import Fleet
from kvrouter.kernel.placement.placement import Draw, Placement
from kvrouter.kernel.placement.placer import Placer
from kvrouter.kernel.routing.interface import RoutingSettings
from kvrouter.kernel.topology.link_table import ACROSS_LINK, LinkTable
from tests.kernel.unit.test_learned_costs import request_of
from tests.testing.placement_events import first_attempt, plain_placer
from tests.testing.router_harness import BLOCK_SIZE, MODEL, card

LEVELS = ("zone", "rack", "host")
N_PREFILL, N_DECODE = 2, 8
KV_BYTES = 100_000
ASSUMED = LinkTable(assumes_otherwise=True)

places = st.dictionaries(st.sampled_from(LEVELS), st.sampled_from("ab"))
fleets = st.lists(places, min_size=N_PREFILL + N_DECODE, max_size=N_PREFILL + N_DECODE)
requests = st.lists(st.integers(64, 4000), min_size=1, max_size=24)

Takes = Callable[[Mapping[str, str], Mapping[str, str]], float]


class Pairs:
    """A placer over prefill and decode workers at ``domains``, on a clock that a test turns."""

    def __init__(
        self,
        domains: Sequence[Mapping[str, str]],
        table: LinkTable,
        selection: PdSelection = PdSelection.SEQUENTIAL,
    ) -> None:
        fleet = Fleet(MODEL, BLOCK_SIZE)
        for number, place in enumerate(domains):
            joins = card(number + 1, Role.PREFILL if number < N_PREFILL else Role.DECODE)
            config = structs.replace(
                joins.runtime_config,
                topology_domains=dict(place),
                topology_levels=LEVELS,
                kv_bytes_per_token=KV_BYTES,
                max_num_seqs=64,
                total_kv_blocks=20_000,
            )
            fleet.join(structs.replace(joins, runtime_config=config))
        settings = RoutingSettings(cost="time", pd_selection=selection, links=table)
        self.placer: Placer = plain_placer(fleet, settings=settings)
        self.domains, self.now_s, self._n = domains, 0.0, 0

    def place(self, tokens: int) -> Placement:
        self._n += 1
        request = request_of(10_000 * self._n, tokens)
        return self.placer.place(
            first_attempt(request), Draw(Random(self._n).getrandbits(64), self._n, self._n), now_s=self.now_s
        )

    def serve(self, tokens: int, takes: Takes) -> tuple[int, int]:
        """Serve one request alone; its transfer takes ``takes`` of its two places. Return its workers."""
        placement = self.place(tokens)
        prefill, decode = workers_of(placement)
        self.now_s += 0.2
        self.placer.prefill_done(placement, now_s=self.now_s)
        self.now_s += takes(self.domains[prefill - 1], self.domains[decode - 1])
        self.placer.first_token(placement, now_s=self.now_s)
        self.now_s += 0.1
        self.placer.release(placement, now_s=self.now_s, tokens=8)
        return prefill, decode


def workers_of(placement: Placement) -> tuple[int, int]:
    prefill, decode = placement.decision.prefill, placement.decision.decode
    return 0 if prefill is None else prefill.rank.worker_id, decode.rank.worker_id


@pytest.mark.parametrize("selection", PdSelection)
@given(fleets, requests)
def test_places_without_links_change_no_choice_of_requests_that_run_at_once(
    selection: PdSelection, domains: list[dict[str, str]], asked: list[int]
) -> None:
    placed, nowhere = (
        Pairs(domains, ASSUMED, selection),
        Pairs([{}] * len(domains), ASSUMED, selection),
    )
    for tokens in asked:
        assert workers_of(placed.place(tokens)) == workers_of(nowhere.place(tokens))


TWO_ZONES = [
    {"zone": "ab"[each % 2], "rack": f"r{each}", "host": f"h{each}"} for each in range(N_PREFILL + N_DECODE)
]


def crossing(pairs: Pairs, n: int, takes: Takes) -> float:
    """Serve ``n`` requests one after the other; return the share of those whose KV left its zone."""
    served = [pairs.serve(2000, takes) for _ in range(n)]
    zones = Counter(
        pairs.domains[prefill - 1].get("zone") == pairs.domains[decode - 1].get("zone")
        for prefill, decode in served
    )
    return zones[False] / n


@pytest.mark.parametrize("slowness", [0.25, 0.4, 1.0, 3.0])
def test_links_that_prove_alike_keep_no_request_in_its_zone(slowness: float) -> None:
    """What they take may be far from what is assumed, and differ from one transfer to the next."""
    rng = Random(7)

    def takes(_src: Mapping[str, str], _dst: Mapping[str, str]) -> float:
        plain_s = 2000 * KV_BYTES / ACROSS_LINK.bandwidth_bytes_per_s
        return ACROSS_LINK.latency_s + 0.01 + plain_s * slowness * rng.uniform(0.97, 1.03)

    pairs = Pairs(TWO_ZONES, ASSUMED)
    crossing(pairs, 20, takes)
    assert 0.35 <= crossing(pairs, 200, takes) <= 0.65
    pairs.now_s += 600.0  # the age of measurements is no difference between links
    assert 0.35 <= crossing(pairs, 200, takes) <= 0.65


def test_a_zone_that_is_learned_to_be_far_keeps_requests_near() -> None:
    def takes(src: Mapping[str, str], dst: Mapping[str, str]) -> float:
        plain_s = 2000 * KV_BYTES / ACROSS_LINK.bandwidth_bytes_per_s
        return plain_s * (1.0 if src["zone"] == dst["zone"] else 8.0)

    pairs = Pairs(TWO_ZONES, ASSUMED)
    crossing(pairs, 20, takes)
    assert crossing(pairs, 100, takes) <= 0.1
    pairs.now_s += 600.0
    assert crossing(pairs, 100, takes) <= 0.1


@pytest.mark.parametrize(
    "links",
    [
        LinksSpec(within={"zone": LinkSpec(latency_s=0.0005, bandwidth_bytes_per_s=12.5e9)}),
        LinksSpec(
            within={"zone": LinkSpec(latency_s=0.0005, bandwidth_bytes_per_s=12.5e9)},
            across=LinkSpec(latency_s=0.002, bandwidth_bytes_per_s=1.25e9),
        ),
    ],
)
def test_stated_links_keep_requests_in_their_zone(links: LinksSpec) -> None:
    pairs = Pairs(TWO_ZONES, table_of(TopologySpec(levels=LEVELS, links=links)))
    assert crossing(pairs, 40, lambda _src, _dst: 0.05) == 0.0


def test_levels_without_links_spread_requests_over_zones() -> None:
    pairs = Pairs(TWO_ZONES, table_of(TopologySpec(levels=LEVELS)))
    placed = [workers_of(pairs.place(2000)) for _ in range(40)]
    assert Counter(decode for _, decode in placed) == dict.fromkeys(range(3, 11), 5)


@given(
    st.dictionaries(
        st.sampled_from(LEVELS),
        st.builds(LinkSpec, latency_s=st.floats(0, 10), bandwidth_bytes_per_s=st.floats(1, 1e12)),
        min_size=1,
    )
)
def test_workers_that_share_less_are_never_assumed_to_be_nearer(within: dict[str, LinkSpec]) -> None:
    otherwise = table_of_links(LinksSpec(within=within)).otherwise
    for spec in within.values():
        assert otherwise.latency_s >= spec.latency_s
        assert otherwise.bandwidth_bytes_per_s <= spec.bandwidth_bytes_per_s

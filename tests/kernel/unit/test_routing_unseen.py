"""Requests of other routers that are placed and not heard of yet: routers at one time decide differently."""

from collections import Counter

import numpy as np
from msgspec import structs

from kvrouter.core.ids import RequestId, WorkerId
from kvrouter.kernel.fleet.fleet import Fleet
from kvrouter.kernel.routing import route
from kvrouter.kernel.routing.interface import RouteRequest, View
from kvrouter.kernel.routing.pick import UNSEEN_MAX, draw_unseen
from tests.testing.plain_fleets import idle_view
from tests.testing.router_harness import BLOCK_SIZE, MODEL, card


def view(*active_blocks: int, unseen: float = 0.0, seed: int = 0) -> View:
    fleet = Fleet(MODEL, BLOCK_SIZE)
    for worker in range(len(active_blocks)):
        fleet.join(card(worker))
    return idle_view(fleet, active_blocks=np.array(active_blocks, np.int64), seed=seed, unseen=unseen)


def request(n_blocks: int, name: str = "r") -> RouteRequest:
    return RouteRequest(RequestId(name), isl_tokens=n_blocks * BLOCK_SIZE, total_blocks=n_blocks)


def picks(of: View, n_blocks: int, n: int = 400) -> Counter[int]:
    """Where ``n`` routers, each with its own draw, send such a request at one time."""
    return Counter(
        route(request(n_blocks, str(seed)), structs.replace(of, seed=seed)).decode.rank.worker_id
        for seed in range(n)
    )


def test_the_cheapest_rank_is_always_picked_without_unseen_requests() -> None:
    assert picks(view(3, 1, 2, 9), 4) == {1: 400}


def test_unseen_requests_spread_picks_over_the_next_cheapest_ranks() -> None:
    spread = picks(view(30, 10, 20, 90, unseen=1.0), 10)  # a request adds 20: 10, 20, 30, 30 again
    assert set(spread) == {0, 1, 2}
    assert spread[1] > 100
    assert spread[2] > 100
    assert spread[3] == 0


def test_a_rank_cheapest_despite_unseen_requests_is_always_picked() -> None:
    assert picks(view(0, 500, 500, unseen=3.0), 10) == {0: 400}


def test_a_refused_rank_takes_no_unseen_request() -> None:
    of = view(0, 10, 10, unseen=1.0)
    of.fleet.set_alive(WorkerId(0), alive=False)
    assert set(picks(of, 10)) == {1, 2}


def test_a_decision_reports_its_number_of_unseen_requests() -> None:
    decision = route(request(4), view(0, 0, unseen=5.0, seed=3))
    assert decision.decode.unseen > 0
    assert decision == route(request(4), view(0, 0, unseen=5.0, seed=3))
    assert route(request(4), view(0, 0)).decode.unseen == 0


def test_unseen_draws_are_spread_up_to_twice_the_expected_number() -> None:
    drawn = Counter(draw_unseen(2.0, draw * 0x9E3779B97F4A7C15) for draw in range(5_000))
    assert set(drawn) == {0, 1, 2, 3, 4}
    assert min(drawn.values()) > 800
    assert sum(draw_unseen(0.05, draw * 0x9E3779B97F4A7C15) for draw in range(5_000)) < 700
    assert draw_unseen(0.0, 7) == 0
    assert draw_unseen(1e9, 2**64 - 1) <= UNSEEN_MAX

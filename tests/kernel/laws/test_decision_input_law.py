"""A decision that is decided again from its kept input has the candidates of the time when it was made."""

from itertools import product
from math import isfinite

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from kvrouter.core.constraints import PdSelection
from kvrouter.core.cost_rules import TIME
from kvrouter.core.ids import WorkerRank
from kvrouter.kernel.routing.decision_input import DecisionInput, decision_input
from kvrouter.kernel.routing.interface import Candidate, Decision, RouteRequest, View
from kvrouter.kernel.routing.route import route, route_decode
from kvrouter.kernel.topology.link_table import Link, LinkTable
from tests.testing.placement_script import WORKERS, PlacementScript, Step, script

BYTE = st.integers(0, 255)
BITS = st.integers(0, 2**64 - 1)
STEPS = st.lists(st.builds(Step, BYTE, BYTE, BYTE, BITS), max_size=60)
LINKS = LinkTable(by_level={"zone": Link(0.001, 1e9)}, otherwise=Link(0.1, 1e8, 0.5))


class WatchedScript(PlacementScript):
    """A script that notes the candidates of each decision when it is made, and keeps its input."""

    def __init__(self, seed: int, *, is_joint: bool) -> None:
        super().__init__(seed)
        self.decided: list[tuple[tuple[Candidate, ...], DecisionInput]] = []
        self.placer.on_decided = self.on_decided
        chosen = self.placer.settings
        if chosen.cost == TIME:
            pairs = PdSelection.JOINT if is_joint else PdSelection.SEQUENTIAL
            chosen = structs.replace(chosen, pd_selection=pairs, links=LINKS, price_weight=0.1)
            self.placer.set_routing(chosen, now_s=self.now_s)

    def on_decided(
        self, route_request: RouteRequest, view: View, decision: Decision, *, prefill: WorkerRank | None
    ) -> None:
        constraint = None if prefill is None else decision.constraint
        if prefill is None:
            explained = route(route_request, view, explain=True)
        else:
            explained = route_decode(route_request, view, constraint, prefill=prefill, explain=True)
        assert {row.rank for row in explained.rows if row.picked} == {
            pick.rank for pick in (explained.prefill, explained.decode) if pick is not None
        }
        kept = decision_input(route_request, view, constraint=constraint, prefill=prefill)
        self.decided.append((explained.rows, kept))


def assert_candidates_are_kept(watched: WatchedScript) -> None:
    for rows, kept in watched.decided:
        assert kept.candidates() == rows


@settings(max_examples=60)
@given(seed=st.integers(0, 63), is_joint=st.booleans(), steps=STEPS)
def test_kept_inputs_give_the_candidates_of_their_time(seed: int, is_joint: bool, steps: list[Step]) -> None:
    watched = WatchedScript(seed, is_joint=is_joint)
    watched.run(script(seed)[:WORKERS] + steps)
    assert_candidates_are_kept(watched)


def test_scripts_decide_with_every_kind_of_candidate() -> None:
    reasons, n_timed, n_pairs, n_again = set(), 0, 0, 0
    for seed, is_joint in product(range(24), (False, True)):
        watched = WatchedScript(seed, is_joint=is_joint)
        watched.run(script(seed))
        assert_candidates_are_kept(watched)
        for rows, kept in watched.decided:
            reasons |= {row.refused for row in rows}
            n_timed += any(row.times is not None and row.times.transfer_s > 0.0 for row in rows)
            n_pairs += any(row.partner is not None for row in rows)
            n_again += kept.prefill is not None
            assert all(isfinite(row.cost) for row in rows)
    assert {reason for reason in reasons if reason is not None} >= {
        "busy", "circuit_open", "domain_mismatch", "kv_lost", "excluded",
    }  # fmt: skip
    assert min(n_timed, n_pairs, n_again) > 0

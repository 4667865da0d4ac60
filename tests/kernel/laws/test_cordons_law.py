"""A cordoned rank is never picked, whatever the request and the mode; uncordoned, all is as before."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from kvrouter.core.constraints import RouterMode
from kvrouter.core.cordon_rules import NODE_LEVEL, WORKER_LEVEL, Cordon, CordonRules
from kvrouter.core.cost_rules import COST_RULES
from kvrouter.core.errors import Reason, RoutingRefused
from kvrouter.kernel.fleet.fleet import Fleet
from kvrouter.kernel.routing import Decision, View, route
from tests.testing.routing_cases import RoutingCase, case_fleet, routing_cases, view_of


def outcome(case: RoutingCase, view: View) -> Decision | tuple[type[RoutingRefused], object]:
    try:
        return route(case.request, view)
    except RoutingRefused as refused:
        return type(refused), refused.refusals


def drawn(seed: int) -> tuple[Random, RoutingCase, Fleet]:
    rng = Random(seed)
    case = next(routing_cases(rng, 1))
    mode = rng.choice([*RouterMode])
    settings = structs.replace(case.settings, mode=mode)
    request = structs.replace(case.request, last_resort=rng.random() < 0.5, aggregated=rng.random() < 0.2)
    case = case._replace(settings=settings, request=request)
    fleet = case_fleet(case, case.cards)
    for card in case.cards:
        if rng.random() < 0.2:
            fleet.set_circuit_open(card.worker_id, True)
    return rng, case, fleet


def some_rules(rng: Random, case: RoutingCase) -> CordonRules:
    cordons = [Cordon(WORKER_LEVEL, str(card.worker_id)) for card in case.cards if rng.random() < 0.3]
    for card in case.cards:
        for level, name in card.runtime_config.domains.items():
            if rng.random() < 0.1:
                cordons.append(Cordon(level, name))
    return CordonRules([*cordons, Cordon(NODE_LEVEL, "nowhere")])


@given(st.integers(0, 2**32))
def test_a_cordoned_rank_is_treated_like_a_dead_rank(seed: int) -> None:
    rng, case, fleet = drawn(seed)
    dead = case_fleet(case, case.cards)
    for card in case.cards:
        dead.set_circuit_open(
            card.worker_id, bool(fleet.columns.circuit_open[fleet.slots_of(card.worker_id)[0]])
        )
    rules = some_rules(rng, case)
    before = outcome(case, view_of(case, fleet))
    fleet.set_cordons(rules)
    cordoned = {card.worker_id for card in case.cards if fleet.cordons_on(card.worker_id)}
    assert cordoned == {card.worker_id for card in case.cards if rules.on(card, card.runtime_config.domains)}
    for worker_id in cordoned:
        dead.set_alive(worker_id, False)
    got = outcome(case, view_of(case, fleet))
    if isinstance(got, Decision):
        picked = {pick.rank.worker_id for pick in (got.prefill, got.decode) if pick is not None}
        assert not picked & cordoned
        assert got == outcome(case, view_of(case, dead))
    else:
        assert not isinstance(outcome(case, view_of(case, dead)), Decision)
    fleet.set_cordons(CordonRules())
    assert outcome(case, view_of(case, fleet)) == before, "uncordoned, everything is as it was"


@given(st.integers(0, 2**32))
def test_explain_rows_show_cordoned_for_cordoned_ranks_only(seed: int) -> None:
    rng, case, fleet = drawn(seed)
    fleet.set_cordons(some_rules(rng, case))
    try:
        rows = route(case.request, view_of(case, fleet), explain=True).rows
    except RoutingRefused as refused:
        rows = refused.rows  # type: ignore[assignment] # rows are routing's own
    columns = fleet.columns
    for row in rows:
        slot = fleet.slot_of(row.rank)
        assert slot is not None
        if columns.cordoned[slot]:
            first = Reason.DRAINING if columns.draining[slot] else Reason.CORDONED
            assert row.refused in (Reason.NOT_ALIVE, Reason.WRONG_ROLE, first)
        else:
            assert row.refused is not Reason.CORDONED


@given(st.integers(0, 2**32), st.sampled_from([*COST_RULES]))
def test_a_worker_that_joins_later_is_cordoned_too(seed: int, cost: str) -> None:
    rng = Random(seed)
    case = next(routing_cases(rng, 1))
    case = case._replace(settings=structs.replace(case.settings, cost=cost))
    rules = some_rules(rng, case)
    here, later = case_fleet(case, case.cards), Fleet(case.cards[0].model, case.cards[0].block_size or 0)
    here.set_cordons(rules)
    later.set_cordons(rules)
    for card in case.cards:
        later.join(card)
    assert [later.cordons_on(card.worker_id) for card in case.cards] == [
        here.cordons_on(card.worker_id) for card in case.cards
    ]
    assert later.columns.cordoned.tolist() == here.columns.cordoned.tolist()

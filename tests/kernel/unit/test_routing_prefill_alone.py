"""Prefill alone: each prefill rank is a target of its own, and the decision tells what decode must obey."""

import pytest
from msgspec.structs import replace

from kvrouter.core.constraints import Pin
from kvrouter.core.errors import NoEligibleWorker, Reason
from kvrouter.core.ids import Taint, WorkerId
from kvrouter.core.requests import Leg
from kvrouter.core.workers import Enforcement, Role, WorkerCard
from kvrouter.kernel.topology.policy import Fallback, MismatchPolicy, Preferred, Required, TransferConstraint
from kvrouter.settings.router_settings import KvRouterConfig
from tests.testing.router_harness import RouterHarness, card, generate_request
from tests.testing.scripted_transport import ScriptedTransport


async def bench_of(*cards: WorkerCard, config: KvRouterConfig | None = None) -> RouterHarness:
    harness = RouterHarness(ScriptedTransport(), config, prefill_alone=True)
    await harness.start(*cards)
    return harness


def prefill(worker_id: int, zone: str | None = None, enforcement: Enforcement | None = None) -> WorkerCard:
    weight = 0.5 if enforcement is Enforcement.PREFERRED else None
    return card(worker_id, Role.PREFILL, zone=zone, enforcement=enforcement, weight=weight)


async def test_a_prefill_alone_spreads_over_prefill_workers_only() -> None:
    harness = await bench_of(prefill(1), prefill(2), card(3, Role.DECODE), card(4, Role.BOTH))
    harness.model.clock = lambda: 0.0  # as time goes on, a step without a first token counts as late
    picked = []
    for number in range(4):
        request = generate_request(request_id=f"r{number}")
        placement = await harness.model.place(request, request.token_ids, attempt=0, excluded=frozenset())
        assert placement.decision.prefill is None
        assert placement.decision.decode.leg is Leg.PREFILL
        picked.append(placement.prefill_pick.rank.worker_id)
    assert sorted(picked) == [1, 1, 2, 2], "load spreads"
    assert int(harness.model.ledger.columns().active_blocks.sum()) == 0


@pytest.mark.parametrize(
    ("enforcement", "policy"),
    [
        (Enforcement.REQUIRED, Required("zone")),
        (Enforcement.FALLBACK, Fallback("zone")),
        (Enforcement.PREFERRED, Preferred("zone", 0.5)),
    ],
)
async def test_the_workers_transfer_policy_is_in_the_decision(
    enforcement: Enforcement, policy: Required | Fallback | Preferred
) -> None:
    harness = await bench_of(prefill(1, "a", enforcement))
    decision = harness.model.explain(generate_request())
    assert decision.constraint == TransferConstraint(policy, "a")
    assert decision.constraint.taint == Taint("dynamo.topology/zone=a")
    assert [row.leg for row in decision.rows] == [Leg.PREFILL]


async def test_the_routers_default_applies_to_a_worker_without_a_policy() -> None:
    config = KvRouterConfig(kv_transfer_topology_level="zone")
    harness = await bench_of(prefill(1, "a"), prefill(2), config=config)
    decision = harness.model.explain(generate_request())
    assert (decision.decode.rank.worker_id, decision.constraint) == (
        1,
        TransferConstraint(Required("zone"), "a"),
    )
    row = next(row for row in decision.rows if row.rank.worker_id == 2)
    assert row.refused is Reason.DOMAIN_UNKNOWN
    falls_back = KvRouterConfig(
        kv_transfer_topology_level="zone", kv_transfer_mismatch_policy=MismatchPolicy.FALLBACK
    )
    harness = await bench_of(prefill(2), config=falls_back)
    assert harness.model.explain(generate_request()).constraint == TransferConstraint(Fallback("zone"), None)


async def test_a_rank_bound_to_an_unknown_domain_gets_no_requests() -> None:
    harness = await bench_of(prefill(1, None, Enforcement.REQUIRED))
    with pytest.raises(NoEligibleWorker) as refused:
        harness.model.explain(generate_request())
    assert refused.value.refusals == {Reason.DOMAIN_UNKNOWN: 1}
    harness.discovery.put(prefill(2, None, Enforcement.PREFERRED))
    assert harness.model.explain(generate_request()).decode.rank.worker_id == 2


async def test_a_prefill_pin_chooses_the_prefill_worker() -> None:
    harness = await bench_of(prefill(1), prefill(2))
    for worker_id in (1, 2):
        request = replace(generate_request(), prefill_pin=Pin(WorkerId(worker_id)))
        assert harness.model.explain(request).decode.rank.worker_id == worker_id


async def test_a_refusal_without_prefill_workers_names_prefill() -> None:
    harness = await bench_of(card(1, Role.BOTH))
    with pytest.raises(
        NoEligibleWorker, match="1 worker ranks are here, none of them for prefill"
    ) as refused:
        harness.model.explain(generate_request())
    assert refused.value.role == "prefill"

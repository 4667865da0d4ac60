"""The law of Available: it says of any workers what the router's own decision says."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.core.errors import NoEligibleWorker
from kvrouter.core.ids import Epoch, ModelName, RequestId, WorkerId
from kvrouter.core.workers import Enforcement, ModelRuntimeConfig, Role, WorkerCard
from kvrouter.kernel.fleet.fleet import Fleet
from kvrouter.kernel.routing import RouteRequest, RoutingSettings, View, route
from kvrouter.kernel.topology.policy import (
    Fallback,
    MismatchPolicy,
    Preferred,
    Required,
    RouterTopologyDefault,
    TransferPolicy,
    policy_of,
)
from kvrouter.operator.policy import DeploymentPolicy, RawLabel
from kvrouter.operator.status.available import Registered, serves

VALUES = st.sampled_from(("a", "b", " a ", ""))
configs = st.builds(
    ModelRuntimeConfig,
    topology_domains=st.dictionaries(st.sampled_from(("zone", "rack")), VALUES, max_size=2),
    kv_transfer_domain=st.sampled_from((None, "zone", "rack")),
    kv_transfer_enforcement=st.sampled_from((None, *Enforcement)),
    kv_transfer_preferred_weight=st.just(0.5),
)
cards = st.builds(
    WorkerCard,
    worker_id=st.integers(0, 1 << 40).map(WorkerId),
    incarnation=st.just(Epoch(1)),
    model=st.just(ModelName("m")),
    role=st.sampled_from(list(Role)),
    block_size=st.just(16),
    context_length=st.just(1024),
    address=st.just("tcp://127.0.0.1:1/1"),
    draining=st.booleans(),
    engine_silent=st.booleans(),
    runtime_config=configs,
)
fleets = st.lists(cards, max_size=5, unique_by=lambda card: card.worker_id)
transfers = st.sampled_from((None, Required("zone"), Fallback("zone"), Preferred("zone", 0.5)))


@given(fleets, transfers)
def test_available_condition_agrees_with_the_routers_decision(
    workers: list[WorkerCard], transfer: TransferPolicy | None
) -> None:
    policy = None if transfer is None else DeploymentPolicy(transfer, RawLabel("example.com/zone"))
    assert serves([registered(card) for card in workers], policy) is is_placed(workers, default_of(transfer))


def registered(card: WorkerCard) -> Registered:
    return Registered(
        model=card.model,
        role=card.role,
        takes_requests=card.takes_new_requests,
        domains=card.runtime_config.domains,
        policy=policy_of(card.runtime_config, None),
    )


def default_of(transfer: TransferPolicy | None) -> RouterTopologyDefault | None:
    """What the operator tells a frontend."""
    match transfer:
        case Required(domain):
            return RouterTopologyDefault(domain, MismatchPolicy.FAIL)
        case Fallback(domain):
            return RouterTopologyDefault(domain, MismatchPolicy.FALLBACK)
    return None


def is_placed(workers: list[WorkerCard], default: RouterTopologyDefault | None) -> bool:
    fleet = Fleet(ModelName("m"), 16)
    for card in workers:
        fleet.join(card)
    nothing = np.zeros(fleet.n_slots, np.int64)
    view = View(fleet, RoutingSettings(topology_default=default), None, nothing, nothing, None)
    try:
        route(RouteRequest(RequestId("probe"), isl_tokens=1, total_blocks=1), view)
    except NoEligibleWorker:
        return False
    return True

"""What this fleet can never meet is a mistake of the client, named by its field; what may change is not."""

from collections.abc import Mapping, Sequence

import pytest
from msgspec import structs

from kvrouter.core.constraints import RouterMode
from kvrouter.core.ids import WorkerId
from kvrouter.core.workers import Enforcement, Role, WorkerCard
from kvrouter.kernel.topology.policy import MismatchPolicy
from kvrouter.settings.router_settings import KvRouterConfig
from tests.testing.frontend_harness import running_frontend, text_answer
from tests.testing.router_harness import MODEL, card

PIN, PREFILL_PIN = "nvext.worker_id", "nvext.prefill_worker_id"
TAINTS = "nvext.routing_constraints.required_taints"
WEIGHT = "nvext.router_config_override.overlap_score_weight"
MODE = "nvext.router_config_override.router_mode"


def split(enforcement: Enforcement | None = Enforcement.REQUIRED) -> list[WorkerCard]:
    weight = 0.5 if enforcement is Enforcement.PREFERRED else None
    return [
        card(1, Role.PREFILL, zone="a", enforcement=enforcement, weight=weight, taints=("gpu=h100",)),
        card(2, Role.DECODE, zone="a"),
        card(3, Role.DECODE, zone="b"),
        card(4, Role.DECODE),
    ]


def requires(*taints: str) -> Mapping[str, object]:
    return {"routing_constraints": {"required_taints": list(taints)}}


async def answers(
    cards: Sequence[WorkerCard], nvext: Mapping[str, object], *, config: KvRouterConfig | None = None
) -> tuple[int, str | None, str]:
    """Status, field and message; a request and its explanation must agree on a mistake of the client."""
    async with running_frontend(*cards, script=text_answer("ok"), config=config) as frontend:
        response = await frontend.chat(nvext=nvext)
        explained = await frontend.http.post(
            "/v1/route/explain", json={"model": MODEL, "prompt": "x", "nvext": nvext}
        )
        assert frontend.harness.booked() == 0
    error = response.json().get("error", {})
    if response.status_code == 400:
        assert (explained.status_code, explained.json()["error"]) == (400, error)
        assert error["message"].startswith(f"{error['param']}: ")
    else:
        assert explained.status_code == 200
    return response.status_code, error.get("param"), error.get("message", "")


async def test_a_passed_through_call_has_its_pins_checked() -> None:
    takes_calls = structs.replace(card(1, Role.PREFILL), takes_calls=True)
    async with running_frontend(takes_calls) as frontend:
        response = await frontend.chat(nvext={"worker_id": 1})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == PIN


@pytest.mark.parametrize(
    ("nvext", "param", "says_why"),
    [
        ({"worker_id": 1}, PIN, "worker 1 only prefills: nvext.prefill_worker_id is the field for it"),
        ({"prefill_worker_id": 2}, PREFILL_PIN, "worker 2 has the role decode, not prefill"),
        ({"worker_id": 2, **requires("gpu=h100", "x")}, TAINTS,
         "worker 2, which nvext.worker_id asks for, does not carry 'gpu=h100', 'x'"),
        ({"worker_id": 3, **requires("dynamo.topology/zone=a")}, TAINTS,
         "worker 3, which nvext.worker_id asks for, does not carry 'dynamo.topology/zone=a'"),
        ({"prefill_worker_id": 1, **requires("gpu=h200")}, TAINTS,
         "worker 1, which nvext.prefill_worker_id asks for, does not carry 'gpu=h200'"),
        ({"prefill_worker_id": 1, "worker_id": 3}, PIN,
         "worker 3 is in zone=b, and KV of worker 1, which nvext.prefill_worker_id asks for, "
         "may not leave zone=a"),
    ],
)  # fmt: skip
async def test_contradicting_pins_are_named(nvext: Mapping[str, object], param: str, says_why: str) -> None:
    assert await answers(split(), nvext) == (400, param, f"{param}: {says_why}")


async def test_a_prefill_pin_is_refused_without_prefill_workers() -> None:
    status, param, message = await answers([card(1), card(2)], {"prefill_worker_id": 1})
    assert (status, param) == (400, PREFILL_PIN)
    assert message.endswith(
        "the role both, not prefill; no worker of 'mock' has it, so requests are not split"
    )


async def test_the_routers_own_policy_binds_two_pins() -> None:
    pins = {"prefill_worker_id": 1, "worker_id": 3}
    fail = KvRouterConfig(kv_transfer_topology_level="zone")
    crossing = KvRouterConfig(
        kv_transfer_topology_level="zone", kv_transfer_mismatch_policy=MismatchPolicy.FALLBACK
    )
    assert (await answers(split(None), pins, config=fail))[:2] == (400, PIN)
    assert (await answers(split(None), pins, config=crossing))[0] != 400
    assert (await answers(split(None), pins))[0] != 400


@pytest.mark.parametrize("enforcement", [Enforcement.PREFERRED, Enforcement.FALLBACK])
async def test_two_pins_may_cross_where_crossing_is_allowed(enforcement: Enforcement) -> None:
    assert (await answers(split(enforcement), {"prefill_worker_id": 1, "worker_id": 3}))[0] != 400


async def test_pins_on_temporarily_unusable_workers_are_a_503() -> None:
    unknown_place = {"prefill_worker_id": 1, "worker_id": 4}
    assert (await answers(split(), unknown_place))[:2] == (503, None)
    draining = [card(1, draining=True), card(2)]
    assert (await answers(draining, {"worker_id": 1}))[:2] == (503, None)
    async with running_frontend(card(1), card(2), script=text_answer("ok")) as frontend:
        frontend.harness.model.fleet.set_alive(WorkerId(1), False)
        dead = await frontend.chat(nvext={"worker_id": 1})
        alive = await frontend.chat(nvext={"worker_id": 2})
    assert (dead.status_code, dead.json()["error"]["code"]) == (503, "no_eligible_worker")
    assert alive.status_code == 200


ROUND_ROBIN = KvRouterConfig(router_mode=RouterMode.ROUND_ROBIN)
WEIGHTLESS = KvRouterConfig(overlap_score_weight=0.0)


@pytest.mark.parametrize(
    ("config", "override", "param"),
    [
        (ROUND_ROBIN, {"router_mode": "kv"}, MODE),
        (ROUND_ROBIN, {"router_mode": "kv", "overlap_score_weight": 0.0}, None),
        (ROUND_ROBIN, {"router_mode": "random"}, None),
        (ROUND_ROBIN, {"overlap_score_weight": 2.0}, WEIGHT),
        (WEIGHTLESS, {"overlap_score_weight": 0.5}, WEIGHT),
        (WEIGHTLESS, {"router_mode": "kv", "router_temperature": 1.0}, None),
        (KvRouterConfig(kv_events=False), {"router_mode": "kv", "overlap_score_weight": 2.0}, None),
        (KvRouterConfig(), {"router_mode": "kv", "overlap_score_weight": 2.0}, None),
    ],
)
async def test_an_overlap_override_without_an_index_is_refused(
    config: KvRouterConfig, override: Mapping[str, object], param: str | None
) -> None:
    status, named, message = await answers([card(1)], {"router_config_override": override}, config=config)
    assert (status, named) == (200 if param is None else 400, param)
    assert param is None or "no index is kept by this router" in message

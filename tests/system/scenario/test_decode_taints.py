"""A taint that is required of decode alone: prefill goes anywhere, decode only where it is carried."""

from kvrouter.core.constraints import RoutingConstraints
from kvrouter.core.errors import Reason
from kvrouter.core.ids import Taint
from kvrouter.core.taints import required_taints
from kvrouter.core.workers import Enforcement, Role
from tests.testing.frontend_harness import error_of, handoff_script, running_frontend
from tests.testing.router_harness import card

LARGE = "gpu=h200"
WISH = {"nvext": {"routing_constraints": {"required_decode_taints": [LARGE]}}}
PAIRS = [
    card(1, Role.PREFILL),
    card(2, Role.DECODE),
    card(3, Role.DECODE, taints=(LARGE,)),
]


async def test_a_required_decode_taint_constrains_only_decode() -> None:
    async with running_frontend(*PAIRS, script=handoff_script) as frontend:
        for number in range(6):
            response = await frontend.chat(f"hello {number}", fields=WISH)
            assert response.status_code == 200
            headers = response.headers
            assert (headers["x-kvrouter-prefill-worker"], headers["x-kvrouter-decode-worker"]) == ("1", "3")
        both = {"nvext": {"routing_constraints": {"required_taints": [LARGE]}}}
        refused = await frontend.chat(fields=both)
        assert refused.status_code == 503, "required of both legs, and no prefill worker carries it"


async def test_an_aggregated_worker_must_carry_a_required_decode_taint() -> None:
    async with running_frontend(card(1), card(2, taints=(LARGE,)), script=handoff_script) as frontend:
        for number in range(6):
            response = await frontend.chat(f"hello {number}", fields=WISH)
            assert response.headers["x-kvrouter-decode-worker"] == "2"


async def test_prefill_stays_in_the_domain_of_tainted_decode_workers() -> None:
    """KV may not leave its zone: the prefill worker is picked that such a decode worker can follow."""
    cards = [
        card(1, Role.PREFILL, zone="a", enforcement=Enforcement.REQUIRED),
        card(2, Role.PREFILL, zone="b", enforcement=Enforcement.REQUIRED),
        card(3, Role.DECODE, zone="a"),
        card(4, Role.DECODE, zone="b", taints=(LARGE,)),
    ]
    async with running_frontend(*cards, script=handoff_script) as frontend:
        for number in range(6):
            headers = (await frontend.chat(f"hello {number}", fields=WISH)).headers
            assert (headers["x-kvrouter-prefill-worker"], headers["x-kvrouter-decode-worker"]) == ("2", "4")


async def test_an_unsatisfiable_decode_taint_is_refused_by_its_field() -> None:
    async with running_frontend(*PAIRS, script=handoff_script) as frontend:
        field = "nvext.routing_constraints.required_decode_taints"
        pinned = {"nvext": {**WISH["nvext"], "worker_id": 2}}
        error = error_of(await frontend.chat(fields=pinned))
        assert error["param"] == field
        sender = {"nvext": {**WISH["nvext"], "prefill_worker_id": 1}}
        assert (await frontend.chat(fields=sender)).status_code == 200
        two = [f"dynamo.topology/zone={zone}" for zone in "ab"]
        contradicting = {"required_taints": two[:1], "required_decode_taints": two[1:]}
        error = error_of(await frontend.chat(fields={"nvext": {"routing_constraints": contradicting}}))
        assert error["param"] == field
    constraints = RoutingConstraints(required_decode_taints=frozenset({Taint(LARGE)}))
    assert required_taints(constraints, prefill=True) == frozenset()
    assert required_taints(constraints, prefill=False) == {LARGE}


async def test_an_explanation_names_decode_ranks_without_the_taint() -> None:
    async with running_frontend(*PAIRS[:2], script=handoff_script) as frontend:
        assert (await frontend.chat(fields=WISH)).status_code == 503
        explained = await frontend.http.post(
            "/v1/route/explain", json={"model": "mock", "prompt": "hello", **WISH}
        )
        rows = explained.json()["decode"]["candidates"]
        assert [row["reason"] for row in rows] == [Reason.TAINT_MISSING.value]

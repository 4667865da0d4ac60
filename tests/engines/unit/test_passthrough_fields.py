"""What becomes of fields that decide where KV comes from, which rank serves, or what a request is called.

They are those of vLLM 0.32 and SGLang 0.5.23, which get calls as clients wrote them.
"""

import json
from array import array
from typing import Any

import pytest
from msgspec.structs import replace

from kvrouter.core.errors import InvalidRequest
from kvrouter.core.ids import DpRank, ModelName, RequestId
from kvrouter.core.requests import Bootstrap, CallRoute, ClientCall, EngineRequest, Leg, Sampling
from kvrouter.engines.sglang import calls as sglang
from kvrouter.engines.vllm import calls as vllm
from tests.testing.body_parsers import parse_passthrough
from tests.testing.engine_requests import client_call, full_request

REFUSED: dict[str, object] = {
    "kv_transfer_params": {"remote_host": "h"},
    "ec_transfer_params": {"a": 1},
    "disaggregated_params": {"request_type": "generation_only"},
    "bootstrap_host": "h",
    "bootstrap_port": 1,
    "bootstrap_room": [1],
    "routed_dp_rank": 0,
    "data_parallel_rank": 1,
    "disagg_prefill_dp_rank": 1,
    "extra_key": "k",
    "session_params": {"id": "s", "rid": "r"},
}
NAMES = {"rid": "r-of-another", "request_id": "r-of-another"}
PASSED: dict[str, object] = {
    "priority": 3,
    "session_id": "s",
    "conversation_params": {"conversation_id": "c"},
    "custom_params": {"a": 1},
    "vllm_xargs": {"session_id": "s"},
}
"""What tells an engine no more than what belongs together, and what is more urgent where it is set to ask."""

HOW: list[tuple[CallRoute, dict[str, object]]] = [
    (CallRoute.CHAT, {"messages": [{"role": "user", "content": "hi"}]}),
    (CallRoute.COMPLETION, {"prompt": "hi"}),
]
MEETING = Bootstrap(host="10.0.0.3", port=8998, room=7)


@pytest.mark.parametrize(("route", "asked"), HOW)
@pytest.mark.parametrize("field", REFUSED)
def test_fields_reserved_for_the_router_are_refused(
    field: str, route: CallRoute, asked: dict[str, object]
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_passthrough(route, json.dumps({"model": "m", **asked, field: REFUSED[field]}).encode())
    assert refused.value.param == field
    parse_passthrough(route, json.dumps({"model": "m", **asked, field: None}).encode())


@pytest.mark.parametrize("n_ranks", [1, 2])
@pytest.mark.parametrize("bootstrap", [None, MEETING])
@pytest.mark.parametrize("kind", list(Leg))
def test_sglang_gets_reserved_fields_only_from_the_router(
    kind: Leg, bootstrap: Bootstrap | None, n_ranks: int
) -> None:
    asked = client_call({"model": "m", **HOW[0][1], **REFUSED, **NAMES, **PASSED})
    leg = full_request(asked, kind, dp_rank=DpRank(1), bootstrap=bootstrap)
    body: dict[str, Any] = json.loads(sglang.call_of(leg, n_ranks=n_ranks).body)
    expected: dict[str, object] = {"routed_dp_rank": 1} if n_ranks > 1 else {}
    if bootstrap is not None:
        expected |= {"bootstrap_host": "10.0.0.3", "bootstrap_port": 8998, "bootstrap_room": 7}
    vllms = {"kv_transfer_params", "ec_transfer_params", "disaggregated_params"}  # which SGLang does not know
    assert {name: body[name] for name in REFUSED.keys() & body.keys() - vllms} == expected
    assert body["rid"].startswith("r-i#1#")
    assert {name: body[name] for name in PASSED} == PASSED


@pytest.mark.parametrize("kind", [Leg.DECODE, Leg.AGGREGATED])
def test_vllm_gets_reserved_fields_only_from_the_router(kind: Leg) -> None:
    asked = client_call({"model": "m", **HOW[0][1], **REFUSED, **NAMES, **PASSED})
    call = vllm.call_of(full_request(asked, kind, dp_rank=DpRank(1)), model="m", n_ranks=2)
    body = json.loads(call.body)
    assert not {"kv_transfer_params", "ec_transfer_params"} & body.keys()
    assert call.headers == {"X-Request-Id": "r-i#1", "X-data-parallel-rank": "1"}  # vLLM lets the header win
    assert {name: body[name] for name in PASSED} == PASSED


def passed_leg(**fields: Any) -> EngineRequest:
    call = ClientCall(
        CallRoute.EMBEDDINGS, b'{"model":"m","input":"a","lora_path":"x"}', stream=False, resumable=False
    )
    tokens = array("I")
    leg = EngineRequest(RequestId("r"), 0, Leg.AGGREGATED, ModelName("m"), tokens, Sampling(1), call=call)
    return replace(leg, **fields)


def test_passed_sglang_call_goes_to_the_picked_rank() -> None:
    sent = json.loads(sglang.call_of(passed_leg(dp_rank=DpRank(1)), n_ranks=2).body)
    assert sent == {"model": "m", "input": "a", "routed_dp_rank": 1}
    assert "routed_dp_rank" not in json.loads(sglang.call_of(passed_leg()).body)


def test_passed_sglang_call_with_an_adapter_is_refused() -> None:
    with pytest.raises(InvalidRequest) as refused:
        sglang.call_of(passed_leg(lora_name="ada"))
    assert refused.value.param == "model"
    assert json.loads(vllm.call_of(passed_leg(lora_name="ada"), model="m").body)["model"] == "ada"

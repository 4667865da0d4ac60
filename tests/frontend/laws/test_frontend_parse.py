"""Whatever bytes come, there is a call or an error that says so; and the error itself can be sent."""

import json

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.core.errors import InvalidRequest
from kvrouter.frontend.errors import error_body
from kvrouter.frontend.openai.parse import ChatCall, CompletionCall
from tests.testing.body_parsers import parse_chat, parse_completion, parse_either

FIELDS = [
    "model", "messages", "prompt", "n", "stop", "stream", "stream_options", "max_tokens", "temperature",
    "seed", "nvext", "tools", "logprobs", "logit_bias", "response_format", "cache_salt", "top_k", "echo",
    "routing_constraints", "required_taints", "preferred_taints", "router_config_override", "worker_id",
    "dp_rank", "extra_fields", "role", "content", "type",
]  # fmt: skip

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["m", "user", "kv", "text", "dynamo.topology/zone=a", "dynamo.topology/zone"])
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=5),
    max_leaves=12,
)
bodies = st.fixed_dictionaries(
    {"model": st.just("m") | scalars},
    optional={field: values for field in FIELDS if field != "model"},
)
valid_bodies = st.fixed_dictionaries(
    {"model": st.just("m"), "prompt": st.text(min_size=1), "messages": st.just([{"role": "user"}])},
    optional={"nvext": st.dictionaries(st.sampled_from(FIELDS), values, max_size=3), "stop": values},
)


def is_call_or_error(data: bytes) -> None:
    for parse in (parse_chat, parse_completion, parse_either):
        refused: InvalidRequest | None = None
        try:
            parsed = parse(data)
        except InvalidRequest as error:
            refused = error
        if refused is None:
            assert isinstance(parsed, ChatCall | CompletionCall)
        else:
            sent = msgspec.json.decode(error_body(refused))["error"]
            assert (sent["message"], sent["param"]) == (refused.message, refused.param)
            assert len(refused.message) < 5_000


@given(st.binary(max_size=200))
def test_any_bytes_parse_to_a_call_or_an_error(data: bytes) -> None:
    is_call_or_error(data)


@given(st.one_of(bodies, valid_bodies, values))
def test_any_json_parses_to_a_call_or_an_error(body: object) -> None:
    """``json`` writes NaN, infinities and lone surrogates, as careless clients do."""
    is_call_or_error(json.dumps(body).encode())


@given(st.one_of(bodies, valid_bodies), st.data())
def test_json_with_a_changed_byte_parses_to_a_call_or_an_error(body: object, data: st.DataObject) -> None:
    text = bytearray(json.dumps(body, ensure_ascii=False).encode("utf-8", "surrogatepass"))
    at = data.draw(st.integers(0, len(text) - 1))
    text[at] = data.draw(st.integers(0, 255))
    is_call_or_error(bytes(text))

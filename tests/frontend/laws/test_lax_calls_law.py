"""Whatever an object says in the fields that engines judge, the router refuses none of it."""

import asyncio
import json

from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvrouter.core.ids import ModelName
from kvrouter.core.requests import EngineChunk, EngineRequest, FinishReason
from kvrouter.engines.sglang import calls as sglang
from kvrouter.engines.trtllm import calls as trtllm
from kvrouter.engines.vllm import calls as vllm
from kvrouter.frontend.openai.body import MisplacedFields
from kvrouter.frontend.openai.passthrough import ROUTERS_FIELDS
from tests.frontend.unit.test_frontend_passthrough import taking
from tests.testing.frontend_harness import running_frontend
from tests.testing.router_harness import MODEL
from tests.testing.scripted_transport import ScriptedStream

REFUSED = {*ROUTERS_FIELDS, *MisplacedFields.__struct_fields__, "nvext", "vllm_xargs"}
"""What is the router's to judge: no other field may be what its refusal names."""

WHOLE = b'{"id":"theirs"}'
FIELDS = (
    "model", "messages", "prompt", "stream", "stream_options", "max_tokens", "max_completion_tokens", "stop",
    "cache_salt", "tools", "tool_choice", "chat_template", "chat_template_kwargs", "documents", "n", "echo",
    "add_generation_prompt", "continue_final_message", "add_special_tokens", "response_format", "seed",
    "temperature", "logprobs", "input", "instructions", "system", "previous_response_id", "max_output_tokens",
    "best_of", "use_beam_search", "prompt_embeds", "vllm_xargs", "worker_id", "extra_key",
)  # fmt: skip
PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/embeddings",
    "/tokenize",
)
SALTLESS = "/v1/messages"
"""Engines read no salt of its calls: one is refused, as what it keeps apart would be shared."""

TEXT = st.text(max_size=8) | st.sampled_from(["user", "tool", "text", "on", "16", "1e9", MODEL])
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
)
KEYS = st.sampled_from(["role", "content", "type", "text", "function", "name", "include_usage", "tool_calls"])
VALUES = st.recursive(
    SCALARS | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS | TEXT, inner, max_size=4),
    max_leaves=12,
)
BODIES = st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=8)
CALLS = st.lists(st.tuples(st.sampled_from(PATHS), BODIES), min_size=1, max_size=25)


def answers(stream: ScriptedStream) -> None:
    stream.feed(EngineChunk(raw=WHOLE, finish=FinishReason.STOP))


@given(CALLS)
@example([(SALTLESS, {"cache_salt": "0"})])
@settings(max_examples=25, deadline=None)
def test_calls_with_any_engine_fields_are_sent_to_the_engine(
    calls: list[tuple[str, dict[str, object]]],
) -> None:
    asyncio.run(all_sent(calls))


async def all_sent(calls: list[tuple[str, dict[str, object]]]) -> None:
    async with running_frontend(taking(1), script=answers) as frontend:
        for path, fields in calls:
            body = json.dumps(fields).encode()
            before = len(frontend.plane.opened)
            response = await frontend.http.post(path, content=body)
            named = fields.get("model")
            if isinstance(named, str) and named not in ("", MODEL):
                assert response.status_code == 404, (body, response.text)
            elif response.status_code == 400:
                param = response.json()["error"]["param"]
                refused = REFUSED | ({"cache_salt"} if path == SALTLESS else set())
                assert param.partition(".")[0] in refused, (body, response.text)
            else:
                assert (response.status_code, response.content) == (200, WHOLE), (body, response.text)
                (sent,) = frontend.plane.opened[before:]
                assert sent.request.call is not None
                assert sent.request.call.body == body
                to_engines(sent.request)


def to_engines(request: EngineRequest) -> None:
    """Every engine is sent it; TensorRT-LLM's takes a salt for chats alone, which is our limit."""
    vllm.call_of(request, model=ModelName(MODEL))
    sglang.call_of(request)
    if request.cache_namespace is None:
        trtllm.call_of(request, has_shared_ids=True)

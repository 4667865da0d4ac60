"""How vLLM is asked for each leg."""

import json
from typing import Any

import pytest
from msgspec.structs import replace

from kvrouter.core.errors import InvalidRequest
from kvrouter.core.ids import DpRank
from kvrouter.core.requests import (
    CallRoute,
    ClientCall,
    ClientForm,
    EngineRequest,
    FinishReason,
    Leg,
    Sampling,
)
from kvrouter.engines.openai.engine import EngineCall
from kvrouter.engines.openai.sse import AnswerReading
from kvrouter.engines.vllm.calls import ASK_FOR_KV, KEEP_KV, call_of
from tests.testing.engine_requests import client_call as client
from tests.testing.engine_requests import full_request as leg

CHAT: dict[str, object] = {
    "model": "public",
    "messages": [{"role": "user", "content": "hi"}],
    "temperature": 0.10,
    "stream": True,
    "stop": ["END"],
    "never_heard_of": {"a": 1.0},
}
COMPLETION: dict[str, object] = {"model": "public", "prompt": "hi", "stream": True, "stop": "END", "seed": 1}


def asked(request: EngineRequest, n_ranks: int = 1) -> tuple[EngineCall, dict[str, Any]]:
    call = call_of(request, model="tiny", n_ranks=n_ranks)
    return call, json.loads(call.body)


def test_streamed_chat_is_sent_as_written_with_token_ids_and_usage() -> None:
    call, body = asked(leg(client(CHAT)))
    assert body == {
        **CHAT,
        "model": "tiny",
        "return_token_ids": True,
        "stream_options": {"include_usage": True},
    }
    assert b'"temperature":0.1,' in call.body
    assert (call.path, call.streams) == ("/v1/chat/completions", True)
    assert call.reading == AnswerReading(passes_raw=True, added_token_ids=True, added_usage=True)
    assert call.headers == {"X-Request-Id": "r-i#1"}


def test_options_that_the_client_set_are_not_added() -> None:
    said = {**COMPLETION, "return_token_ids": False, "stream_options": {"include_usage": True, "x": 1}}
    call, body = asked(leg(client(said)))
    assert body == {**said, "model": "tiny"}
    assert call.reading == AnswerReading(passes_raw=True)


@pytest.mark.parametrize("several", [{"n": 2}, {"prompt": ["hi", "ho"]}, {"prompt": [[1, 2], [3]]}])
def test_usage_is_not_added_for_several_answers(several: dict[str, object]) -> None:
    call, body = asked(leg(client({**COMPLETION, **several}, resumable=False)))
    assert "stream_options" not in body
    assert call.reading == AnswerReading(passes_raw=True)


@pytest.mark.parametrize("one", [{"n": 1}, {"n": None}, {"prompt": [1, 2]}, {"prompt": "[["}])
def test_usage_is_added_for_one_answer(one: dict[str, object]) -> None:
    call, _ = asked(leg(client({**COMPLETION, **one}, resumable=False)))
    assert call.reading == AnswerReading(passes_raw=True, added_usage=True)


def test_usage_is_added_beside_other_stream_options() -> None:
    _, body = asked(leg(client({**COMPLETION, "stream_options": {"include_usage": False, "x": 1}})))
    assert body["stream_options"] == {"include_usage": True, "x": 1}


def test_token_ids_are_not_asked_for_if_not_resumable() -> None:
    call, body = asked(leg(client(CHAT, resumable=False)))
    assert "return_token_ids" not in body
    assert call.reading == AnswerReading(passes_raw=True, added_usage=True)


def test_unstreamed_chat_is_sent_as_written() -> None:
    said = {name: value for name, value in CHAT.items() if name != "stream"}
    call, body = asked(leg(client(said)))
    assert body == {**said, "model": "tiny"}
    assert (call.streams, call.reading) == (False, AnswerReading(passes_raw=True))


@pytest.mark.parametrize("said", [CHAT, COMPLETION])
def test_prefill_keeps_the_prompt_and_generates_one_token(said: dict[str, object]) -> None:
    more = {"max_tokens": 50, "max_completion_tokens": 50, "min_tokens": 4, "n": 1, "best_of": 1,
            "stream_options": {"include_usage": True}}  # fmt: skip
    call, body = asked(leg(client({**said, **more}), Leg.PREFILL))
    is_chat = "messages" in said
    kept = {} if is_chat else {"max_completion_tokens": 50}
    assert body == {
        **{name: value for name, value in said.items() if name != "stop"},
        **kept,
        "model": "tiny",
        "stream": False,
        "max_tokens": 1,
        "kv_transfer_params": ASK_FOR_KV,
    }
    assert call.path == ("/v1/chat/completions" if is_chat else "/v1/completions")
    assert (call.streams, call.reading) == (False, AnswerReading(passes_raw=False))


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
SHAPES_THE_ANSWER: dict[str, object] = {
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
    "structured_outputs": {"regex": "a+"},
    "guided_json": {"type": "object"},
    "guided_choice": ["a", "b"],
    "stop": ["END"],
    "stop_token_ids": [7],
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "min_tokens": 1024,
    "repetition_detection": {"max_pattern_size": 4},
    "thinking_token_budget": 9,
    "logprobs": True,
    "top_logprobs": 2,
    "logprob_token_ids": [1],
    "stream_interval": 4,
}
SHAPES_THE_PROMPT: dict[str, object] = {
    "tools": TOOLS,
    "documents": [{"title": "a", "text": "b"}],
    "add_generation_prompt": False,
    "continue_final_message": True,
    "chat_template": "{{ messages }}",
    "chat_template_kwargs": {"enable_thinking": False},
    "reasoning_effort": "low",
    "add_special_tokens": True,
    "truncate_prompt_tokens": 5,
    "truncation_side": "left",
    "mm_processor_kwargs": {"fps": 2},
    "media_io_kwargs": {"video": {"num_frames": 4}},
    "cache_salt": "s",
    "vllm_xargs": {"a": "b"},
    "never_heard_of": 1,
    "temperature": 0.5,
}


def test_prefill_keeps_prompt_fields_and_drops_answer_fields() -> None:
    said = {"model": "public", "messages": CHAT["messages"], **SHAPES_THE_PROMPT}
    call, body = asked(leg(client({**said, **SHAPES_THE_ANSWER}), Leg.PREFILL))
    added = {"model": "tiny", "stream": False, "max_tokens": 1, "kv_transfer_params": dict(ASK_FOR_KV)}
    assert body == {**said, **added}
    assert call.answered is None


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_required_tool_stays_in_a_prefill_with_tool_choice_none(
    choice: object,
) -> None:
    said = {**CHAT, "tools": TOOLS, "tool_choice": choice}
    _, body = asked(leg(client(said), Leg.PREFILL))
    assert (body["tools"], body["tool_choice"]) == (TOOLS, "none")
    assert asked(leg(client(said), Leg.DECODE))[1]["tool_choice"] == choice


@pytest.mark.parametrize(
    ("more", "is_alone"),
    [
        ({"tools": TOOLS, "tool_choice": "required"}, True),
        ({"response_format": {"type": "json_object"}}, True),
        ({"tools": TOOLS, "tool_choice": "none"}, False),
        ({"tools": TOOLS, "response_format": None}, False),
    ],
)
def test_prompt_with_choices_in_it_is_left_to_the_decode_engine(
    more: dict[str, object], is_alone: bool
) -> None:
    request = leg(client({**CHAT, **more}), Leg.PREFILL)
    assert (call_of(request, model="tiny", writes_choices=True).answered is not None) is is_alone
    assert call_of(request, model="tiny").answered is None


@pytest.mark.parametrize(
    ("more", "has_another"),
    [
        ({"tools": TOOLS}, True),
        ({"tools": TOOLS, "tool_choice": "auto"}, True),
        ({"tools": TOOLS, "tool_choice": "none"}, False),
        ({"tools": TOOLS, "tool_choice": "required"}, False),
        ({"tools": []}, False),
        ({}, False),
    ],
)
def test_prefill_with_tools_has_a_fallback_with_tool_choice_none(
    more: dict[str, object], has_another: bool
) -> None:
    call, body = asked(leg(client({**CHAT, **more}), Leg.PREFILL))
    assert (call.otherwise is not None) is has_another
    if call.otherwise is not None:
        assert json.loads(call.otherwise()) == {**body, "tool_choice": "none"}
    assert asked(leg(client({**CHAT, **more}), Leg.DECODE))[0].otherwise is None


@pytest.mark.parametrize("choice", ["auto", "none", "required!", "any", None, 1])
def test_other_tool_choices_are_kept_in_a_prefill(choice: object) -> None:
    said = {**CHAT, "tools": TOOLS, "tool_choice": choice}
    assert asked(leg(client(said), Leg.PREFILL))[1]["tool_choice"] == choice


@pytest.mark.parametrize(
    ("alone", "is_alone"),
    [
        ({"prompt_logprobs": 1}, True),
        ({"prompt_logprobs": None}, False),
        ({"echo": True, "logprobs": 1}, True),
        ({"echo": True}, False),
        ({"truncate_prompt_tokens": -1}, True),
        ({"truncate_prompt_tokens": "-1"}, True),
        ({"truncate_prompt_tokens": 1}, False),
    ],
)
def test_prompt_that_decode_must_compute_is_not_prefilled(alone: dict[str, object], is_alone: bool) -> None:
    call = call_of(leg(client({**COMPLETION, **alone}), Leg.PREFILL), model="tiny")
    assert (call.answered is not None) is is_alone


def test_prefill_of_a_resumed_request_sends_tokens() -> None:
    call, body = asked(leg(client(CHAT), Leg.PREFILL, resumed_tokens=1))
    assert (call.path, body["prompt"], body["max_tokens"]) == ("/v1/completions", [5, 6, 7], 1)
    assert "messages" not in body
    assert body["kv_transfer_params"] == dict(ASK_FOR_KV)


def test_prefill_without_a_client_call_sends_tokens() -> None:
    _, body = asked(leg(None, Leg.PREFILL))
    assert (body["prompt"], body["stream"], body["max_tokens"]) == ([5, 6, 7], False, 1)


def test_prefill_that_fetches_kv_has_the_params_of_the_decode_engine() -> None:
    place = {"do_remote_decode": True, "remote_engine_id": "d", "remote_num_tokens": 64}
    request = replace(leg(client(CHAT), Leg.PREFILL), kv_transfer_params=place)
    assert asked(request)[1]["kv_transfer_params"] == place


def test_prefill_leg_of_a_decode_engine_keeps_kv_for_a_prefill_engine() -> None:
    request = replace(leg(None, Leg.PREFILL), kv_transfer_params=None)
    kept = json.loads(call_of(request, model="tiny", is_decode=True).body)
    assert kept["kv_transfer_params"] == KEEP_KV
    assert asked(request)[1]["kv_transfer_params"] == ASK_FOR_KV


@pytest.mark.parametrize(("until", "is_kept"), [(12.5, True), (None, False), ("12.5", False)])
def test_kv_is_kept_only_with_the_time_until_which_it_is(until: object, is_kept: bool) -> None:
    params = {"remote_block_ids": [[1]], "remote_blocks_expiry_time": until}
    call = call_of(leg(None, Leg.PREFILL), model="tiny", is_decode=True)
    answer = {"choices": [{"finish_reason": "length"}], "kv_transfer_params": params}
    assert call.reader()(json.dumps(answer).encode()).kv_transfer_params == (params if is_kept else {})


@pytest.mark.parametrize("call", [client(CHAT), None])
def test_decode_call_has_the_transfer_params_of_the_prefill(call: ClientCall | None) -> None:
    params = {"remote_engine_id": "e", "remote_block_ids": [[1, 2]], "remote_port": 5600}
    _, body = asked(leg(call, Leg.DECODE, kv_transfer_params=params))
    assert body["kv_transfer_params"] == params
    assert "kv_transfer_params" not in asked(leg(call, Leg.DECODE))[1]


@pytest.mark.parametrize(
    "several",
    [
        {"n": 2},
        {"best_of": 2},
        {"prompt": ["hi", "ho"]},
        {"prompt": [[1, 2], [3]]},
        {"use_beam_search": True, "stream": False},
        {"use_beam_search": 1},
        {"use_beam_search": "true"},
        {"n": "2"},
        {"n": 2.0},
        {"prompt_embeds": ["AA", "BB"]},
    ],
)
def test_call_with_several_prompts_or_answers_is_not_prefilled(
    several: dict[str, object],
) -> None:
    said = {**COMPLETION, **several}
    call = call_of(leg(client(said, resumable=False), Leg.PREFILL), model="tiny")
    assert call.answered is not None
    event = call.reader()(call.answered)
    assert (event.kv_transfer_params, event.finish) == ({}, FinishReason.LENGTH)
    _, body = asked(leg(client(said, resumable=False), Leg.DECODE, kv_transfer_params={}))
    body.pop("stream_options", None)
    assert body == {**said, "model": "tiny"}


@pytest.mark.parametrize(
    "one",
    [
        {"n": 1, "best_of": None},
        {"use_beam_search": False},
        {"use_beam_search": None, "prompt_embeds": None},
        {"prompt": [1, 2]},
        {"prompt": [[1, 2]]},
        {"prompt": ["hi"]},
    ],
)
def test_call_with_one_prompt_and_one_answer_is_prefilled(one: dict[str, object]) -> None:
    assert call_of(leg(client({**COMPLETION, **one}), Leg.PREFILL), model="tiny").answered is None


@pytest.mark.parametrize("prompts", [b'"a","b"', b"[1],[2]"])
@pytest.mark.parametrize("blanks", [b" " * 80, b"\n" * 4_000_000])
def test_several_prompts_after_whitespace_are_not_prefilled(prompts: bytes, blanks: bytes) -> None:
    body = b'{"model":"m","prompt":[' + blanks + prompts + b"]}"
    call = ClientCall(CallRoute.COMPLETION, body, stream=False, resumable=False)
    assert call_of(leg(call, Leg.PREFILL), model="tiny").answered is not None


WHERE = {"do_remote_prefill": True, "remote_request_id": "r"}


@pytest.mark.parametrize("tells", [True, False])
@pytest.mark.parametrize("said", [WHERE, None])
def test_missing_transfer_params_are_empty_if_the_engine_gives_none(
    tells: bool, said: dict[str, object] | None
) -> None:
    call = call_of(leg(client(CHAT), Leg.PREFILL), model="tiny", tells_where_kv_waits=tells)
    answer = {"choices": [{"finish_reason": "length"}], "kv_transfer_params": said}
    read = call.reader()(json.dumps(answer).encode())
    assert read.kv_transfer_params == (said if said or tells else {})
    failed = call.reader()(b'{"error":{"message":"no"}}')
    assert failed.kv_transfer_params is None


@pytest.mark.parametrize("call", [client(COMPLETION), None])
def test_decode_with_empty_transfer_params_sends_none(call: ClientCall | None) -> None:
    _, body = asked(leg(call, Leg.DECODE, kv_transfer_params={}))
    assert "kv_transfer_params" not in body


def test_resumed_call_is_a_token_completion_without_stop_strings() -> None:
    more = {"tools": [], "max_completion_tokens": 90, "n": 1, "chat_template": "x", "top_k": 4}
    call, body = asked(leg(client({**CHAT, **more}), resumed_tokens=2))
    assert body == {
        "model": "tiny",
        "prompt": [5, 6, 7],
        "temperature": 0.1,
        "never_heard_of": {"a": 1.0},
        "top_k": 4,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "max_tokens": 9,
        "min_tokens": 2,
    }
    assert (call.path, call.streams) == ("/v1/completions", True)
    assert call.reading == AnswerReading(passes_raw=False)


def test_request_without_a_client_call_sends_its_sampling() -> None:
    _, body = asked(leg())
    assert body == {
        "temperature": 0.5, "top_p": 1.0, "top_k": -1, "frequency_penalty": 0.0, "presence_penalty": 0.0,
        "repetition_penalty": 1.0, "ignore_eos": False, "stop_token_ids": [2], "seed": 3, "model": "tiny",
        "prompt": [5, 6, 7], "stream": True, "stream_options": {"include_usage": True},
        "return_token_ids": True, "max_tokens": 9, "min_tokens": 2,
    }  # fmt: skip
    assert "seed" not in asked(leg(None, sampling=Sampling(max_tokens=1)))[1]


@pytest.mark.parametrize("kind", list(Leg))
@pytest.mark.parametrize("call", [client(CHAT), None])
def test_every_leg_has_its_salt_its_adapter_and_its_rank(kind: Leg, call: ClientCall | None) -> None:
    request = leg(call, kind, cache_namespace="tenant", lora_name="lora-a", dp_rank=DpRank(1))
    sent, body = asked(request, n_ranks=2)
    assert (body["cache_salt"], body["model"]) == ("tenant", "lora-a")
    assert sent.headers == {"X-Request-Id": "r-i#1", "X-data-parallel-rank": "1"}
    assert "X-data-parallel-rank" not in asked(request)[0].headers
    assert "cache_salt" not in asked(leg(call, kind))[1]


@pytest.mark.parametrize("kind", list(Leg))
def test_kv_cache_report_mode_of_the_client_is_removed(kind: Leg) -> None:
    _, body = asked(leg(client({**CHAT, "vllm_xargs": {"kv_cache_report_mode": "full", "x": 1}}), kind))
    assert body["vllm_xargs"] == {"x": 1}


@pytest.mark.parametrize("field", ["vllm_xargs", "stream_options"])
@pytest.mark.parametrize("value", ["text", 1, [{"include_usage": True}]])
def test_malformed_object_fields_are_passed_unchanged(field: str, value: object) -> None:
    call, body = asked(leg(client({**CHAT, "stream": True, field: value})))
    assert body[field] == value
    assert call.reading.added_usage == (field == "vllm_xargs")


@pytest.mark.parametrize(
    ("said", "adds"),
    [
        ({}, True), ({"include_usage": None}, True), ({"include_usage": "off"}, True),
        ({"include_usage": 0.0}, True), ({"include_usage": "yes"}, False), ({"include_usage": 1}, False),
        ({"include_usage": "maybe"}, False), ({"include_usage": []}, False),
    ],
)  # fmt: skip
def test_usage_is_added_where_the_engine_would_not_send_it(said: dict[str, object], adds: bool) -> None:
    call, body = asked(leg(client({**CHAT, "stream": True, "stream_options": said})))
    assert call.reading.added_usage == adds
    assert body["stream_options"] == ({**said, "include_usage": True} if adds else said)


@pytest.mark.parametrize("named", [{}, {"model": None}, {"model": ""}, {"model": 5}, {"model": ["m"]}])
def test_invalid_model_field_is_passed_unchanged(named: dict[str, object]) -> None:
    body = {name: value for name, value in CHAT.items() if name != "model"}
    assert asked(leg(client({**body, **named})))[1].get("model", "absent") == named.get("model", "absent")


def test_object_that_is_not_utf_8_is_an_invalid_request() -> None:
    body = b'{"model":"m","messages":[],"vllm_xargs":{"\xff":1}}'
    with pytest.raises(InvalidRequest) as caught:
        asked(leg(ClientCall(CallRoute.CHAT, body, stream=False, resumable=False)))
    assert caught.value.param == "vllm_xargs"


@pytest.mark.parametrize("kind", [Leg.AGGREGATED, Leg.DECODE])
def test_transfer_params_of_the_client_are_removed(kind: Leg) -> None:
    smuggled = {"kv_transfer_params": "x", "ec_transfer_params": [1]}
    said = {**CHAT, **smuggled, "vllm_xargs": {"of_theirs": 1, **smuggled}}
    _, body = asked(leg(client(said), kind=kind))
    assert smuggled.keys().isdisjoint(body)
    assert body["vllm_xargs"] == {"of_theirs": 1}


FORM = b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\npublic\r\n--b--\r\n'
FORM_TYPE = "multipart/form-data; boundary=b"


@pytest.mark.parametrize(
    ("names_model", "lora", "sent"),
    [
        (True, None, FORM.replace(b"public", b"tiny")),
        (True, "a", FORM.replace(b"public", b"a")),
        (False, None, FORM),
    ],
)
def test_form_is_sent_unchanged_but_for_the_model_name(
    names_model: bool, lora: str | None, sent: bytes
) -> None:
    begin = FORM.index(b"public")
    form = ClientForm(FORM_TYPE, (begin, begin + len(b"public")) if names_model else None)
    written = ClientCall(CallRoute.TRANSCRIPTIONS, FORM, stream=True, resumable=False, form=form)
    call = call_of(replace(leg(written), lora_name=lora), model="tiny")
    assert (call.path, call.body, call.streams) == ("/v1/audio/transcriptions", sent, True)
    assert call.headers == {"X-Request-Id": "r-i#1", "content-type": FORM_TYPE}

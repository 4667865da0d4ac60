"""How TensorRT-LLM is asked for a leg, and how its answers are read."""

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.core.errors import ContextLengthExceeded, InvalidRequest, ProtocolError
from kvrouter.core.ids import DpRank
from kvrouter.core.requests import EngineRequest, FinishReason, Leg, Sampling
from kvrouter.engines.openai.answer_events import finish_of, read_event
from kvrouter.engines.openai.engine import EngineCall
from kvrouter.engines.openai.failures import failure_of
from kvrouter.engines.openai.sse import DONE, AnswerReading, EventCutter
from kvrouter.engines.trtllm.calls import LOST_KV, call_of
from kvrouter.engines.trtllm.handoff import PrefillReader
from kvrouter.transports.requests.port import EngineFailed
from tests.testing.engine_requests import client_call, engine_request
from tests.testing.scripted_engine import page

CHAT: dict[str, object] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hi"}],
    "temperature": 0.1,
    "stream": True,
    "stop": ["END"],
    "n": 1,
    "never_heard_of": 1,
}
COMPLETION: dict[str, object] = {"model": "tiny", "prompt": "hi", "max_tokens": 3}
USAGE = {"include_usage": True}
CONTEXT = page("trtllm-1.3.0-completion-context.json")
ENDED = page("trtllm-1.3.0-chat-context-stop.json")


def asked(request: EngineRequest, *, has_shared_ids: bool = False) -> tuple[EngineCall, dict[str, Any]]:
    call = call_of(request, has_shared_ids=has_shared_ids)
    return call, json.loads(call.body)


def handed(answer: bytes = CONTEXT) -> dict[str, Any]:
    """What a prefill worker of these tokens hands over: all of it passes through JSON and back."""
    params = PrefillReader(engine_request().token_ids)(answer).kv_transfer_params
    assert params is not None
    found: dict[str, Any] = json.loads(json.dumps(dict(params)))
    return found


def decode(body: dict[str, object] | None, answer: bytes = CONTEXT, **changes: Any) -> EngineRequest:
    call = None if body is None else client_call(body)
    return engine_request(kind=Leg.DECODE, call=call, kv_transfer_params=handed(answer), **changes)


def changed(answer: bytes, **fields: object) -> bytes:
    """An answer with other fields in its choice."""
    whole = json.loads(answer)
    whole["choices"][0].update(fields)
    return json.dumps(whole).encode()


def test_streamed_chat_is_sent_as_written_with_usage() -> None:
    call, body = asked(engine_request(call=client_call(CHAT)))
    assert body == {**CHAT, "stream_options": USAGE}
    assert (call.path, call.streams) == ("/v1/chat/completions", True)
    assert call.reading == AnswerReading(passes_raw=True, added_usage=True)


@pytest.mark.parametrize("options", [USAGE, {}, {"include_usage": True, "continuous_usage_stats": True}])
def test_stream_options_that_give_the_client_usage_are_kept(options: dict[str, object]) -> None:
    call, body = asked(engine_request(call=client_call({**CHAT, "stream_options": options})))
    assert (body["stream_options"], call.reading) == (options, AnswerReading(passes_raw=True))


@pytest.mark.parametrize("options", [None, {"include_usage": False}, {"include_usage": None}])
def test_usage_is_added_if_the_client_does_not_get_it(options: dict[str, object] | None) -> None:
    call, body = asked(engine_request(call=client_call({**CHAT, "stream_options": options})))
    assert (body["stream_options"], call.reading.added_usage) == (USAGE, True)


def test_an_answer_that_is_not_streamed_gets_no_stream_options() -> None:
    call, body = asked(engine_request(call=client_call(COMPLETION)))
    assert (body, call.streams, call.reading) == (COMPLETION, False, AnswerReading(passes_raw=True))


@pytest.mark.parametrize("options", [1, "a", [USAGE], {"include_usage": "maybe"}])
def test_unreadable_stream_options_are_passed_unchanged(options: object) -> None:
    call, body = asked(engine_request(call=client_call({**CHAT, "stream": True, "stream_options": options})))
    assert (body["stream_options"], call.reading.added_usage) == (options, False)


def test_tokens_are_sent_as_a_completion_without_detokenization() -> None:
    sampling = Sampling(max_tokens=9, min_tokens=2, temperature=0.5, seed=3, stop_token_ids=(2,))
    call, body = asked(engine_request(sampling=sampling))
    assert body == {
        "model": "tiny", "prompt": [5, 6, 7], "max_tokens": 9, "min_tokens": 2, "stream": True,
        "stream_options": USAGE, "detokenize": False, "temperature": 0.5, "top_p": 1.0, "top_k": 0,
        "frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "seed": 3,
        "stop_token_ids": [2], "ignore_eos": False,
    }  # fmt: skip
    assert (call.path, call.streams) == ("/v1/completions", True)
    assert call.reading == AnswerReading(passes_raw=False)
    assert "seed" not in asked(engine_request())[1]


def test_resumed_call_keeps_client_sampling_and_no_other_client_field() -> None:
    call, body = asked(engine_request(call=client_call(CHAT), resumed_tokens=1))
    assert (call.path, call.reading) == ("/v1/completions", AnswerReading(passes_raw=False))
    assert body == {
        "model": "tiny", "prompt": [5, 6, 7], "max_tokens": 9, "min_tokens": 0, "stream": True,
        "stream_options": USAGE, "detokenize": False, "temperature": 0.1,
    }  # fmt: skip


def test_cache_salt_is_sent_in_chats_and_refused_in_other_calls() -> None:
    chat = engine_request(call=client_call(CHAT), cache_namespace="tenant")
    assert asked(chat)[1]["cache_salt"] == "tenant"
    for call in (None, client_call(COMPLETION)):
        with pytest.raises(InvalidRequest) as caught:
            asked(engine_request(call=call, cache_namespace="tenant"))
        assert caught.value.param == "cache_salt"


def test_adapter_name_is_refused() -> None:
    with pytest.raises(InvalidRequest) as caught:
        asked(engine_request(call=client_call(CHAT), lora_name="ada"))
    assert caught.value.param == "model"


@pytest.mark.parametrize("body", [CHAT, COMPLETION, None])
def test_a_prefill_leg_is_context_only_and_not_streamed(body: dict[str, object] | None) -> None:
    said = None if body is None else {**body, "stream": True, "stream_options": USAGE}
    request = engine_request(
        kind=Leg.PREFILL, call=None if said is None else client_call(said), dp_rank=DpRank(0)
    )
    call, sent = asked(request)
    assert sent["disaggregated_params"] == {"request_type": "context_only"}
    assert (sent["stream"], "stream_options" in sent) == (False, False)
    assert (call.streams, call.reading) == (False, AnswerReading(passes_raw=False))
    if body is not None:
        assert {**sent, **body, "stream": None} == {**sent, "stream": None}


def test_shared_request_ids_are_distinct_and_above_engine_ids() -> None:
    ids = {
        asked(engine_request(kind=Leg.PREFILL, attempt=attempt), has_shared_ids=True)[1][
            "disaggregated_params"
        ]["disagg_request_id"]
        for attempt in range(20)
    }
    assert len(ids) == 20
    assert all(2**40 <= shared_id < 2**63 for shared_id in ids)


@pytest.mark.parametrize("field", ["n", "best_of"])
def test_prefill_of_several_answers_is_refused(field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        asked(engine_request(kind=Leg.PREFILL, call=client_call({**CHAT, field: 2})))
    assert caught.value.param == field


@pytest.mark.parametrize("prompts", [["a", "b"], [[1], [2]]])
def test_prefill_of_several_prompts_is_refused(prompts: list[object]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        asked(engine_request(kind=Leg.PREFILL, call=client_call({**COMPLETION, "prompt": prompts})))
    assert caught.value.param == "prompt"
    _, body = asked(engine_request(kind=Leg.PREFILL, call=client_call({**COMPLETION, "prompt": prompts[:1]})))
    assert body["prompt"] == prompts[:1]


def test_transfer_params_of_the_prefill_reach_the_decode_leg() -> None:
    reported = json.loads(CONTEXT)
    expected = {
        **reported["choices"][0]["disaggregated_params"],
        "request_type": "generation_only",
        "ctx_usage": reported["usage"],
    }
    call, body = asked(decode(CHAT))
    assert body == {
        **CHAT, "stream_options": USAGE, "disaggregated_params": expected, "prompt_token_ids": [5, 6, 7],
    }  # fmt: skip
    assert (call.streams, call.kv_failures) == (True, LOST_KV)
    _, body = asked(decode(COMPLETION))
    assert body == {**COMPLETION, "prompt": [5, 6, 7], "disaggregated_params": expected}
    _, body = asked(decode(None))
    assert (body["prompt"], body["disaggregated_params"]) == ([5, 6, 7], expected)


def test_disaggregated_params_are_removed_from_the_client_answer() -> None:
    call, _ = asked(decode(COMPLETION))
    cleaned = json.loads(call.reading.cleaned(CONTEXT))
    reported = json.loads(CONTEXT)
    reported["choices"][0]["disaggregated_params"] = reported["prompt_token_ids"] = None
    assert cleaned == reported
    assert asked(engine_request(call=client_call(COMPLETION)))[0].reading.cleaned(CONTEXT) == CONTEXT


def test_engine_error_keeps_its_message_and_class() -> None:
    error = failure_of(400, page("trtllm-1.3.0-error-field.json"))
    assert isinstance(error, InvalidRequest)
    assert "Extra inputs are not permitted" in error.message
    assert not error.message.startswith("{")
    assert isinstance(failure_of(400, page("trtllm-1.3.0-error-context.json")), ContextLengthExceeded)


def test_recorded_streams_are_read_as_openai_events() -> None:
    chat, tokens = (page(f"trtllm-1.3.0-{name}.sse") for name in ("chat", "completion-tokens"))
    events = [read_event(data) for _, data in EventCutter().push(chat) if data and data != DONE]
    assert [event.text_chars for event in events] == [0, 3, 4, 0]
    assert (events[2].finish, events[3].is_usage_alone) == (FinishReason.LENGTH, True)
    events = [read_event(data) for _, data in EventCutter().push(tokens) if data and data != DONE]
    assert [event.token_ids for event in events] == [(606,), (1309, 7), ()]
    assert finish_of("cancelled") is FinishReason.CANCELLED


def test_ctx_usage_is_not_sent_to_an_older_engine() -> None:
    older = {"request_type": "context_only", "first_gen_tokens": [606], "ctx_request_id": 1}
    _, body = asked(decode(COMPLETION, changed(CONTEXT, disaggregated_params=older)))
    assert body["disaggregated_params"] == {**older, "request_type": "generation_only"}


@pytest.mark.parametrize("reported", [[5, 6, 8], [[5, 6, 8]]])
def test_decode_leg_uses_the_prompt_tokens_of_the_prefill_engine(reported: object) -> None:
    answer = json.dumps({**json.loads(CONTEXT), "prompt_token_ids": reported}).encode()
    assert asked(decode(COMPLETION, answer))[1]["prompt"] == [5, 6, 8]


@pytest.mark.parametrize("reported", [[5, 6, 7], [[5, 6, 7]], None])
def test_prompt_equal_to_the_router_prompt_is_not_handed_over(reported: object) -> None:
    answer = json.dumps({**json.loads(CONTEXT), "prompt_token_ids": reported}).encode()
    assert "prompt_token_ids" not in handed(answer)


def test_prefill_answer_gives_finish_and_usage_without_tokens() -> None:
    event = PrefillReader(engine_request().token_ids)(CONTEXT)
    assert (event.finish, event.token_ids, event.text_chars) == (FinishReason.LENGTH, (), 0)
    assert event.usage is not None
    assert event.usage.cached_tokens == 2
    event = PrefillReader(engine_request().token_ids)(changed(CONTEXT, disaggregated_params=None))
    assert event.kv_transfer_params is None


def test_not_finished_prefill_answer_gives_transfer_params() -> None:
    event = PrefillReader(engine_request().token_ids)(changed(CONTEXT, finish_reason="not_finished"))
    assert event.finish is FinishReason.LENGTH
    assert event.kv_transfer_params is not None


@pytest.mark.parametrize(
    ("answer", "field"),
    [
        (b"{", "data"),
        (b"\xff", "data"),
        (b'{"choices":[]}', "choices"),
        (b'{"choices":[{"finish_reason":"length","disaggregated_params":1}]}', "data"),
    ],
)
def test_malformed_prefill_answer_is_refused(answer: bytes, field: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        PrefillReader(engine_request().token_ids)(answer)
    assert caught.value.param == field


_odd = st.none() | st.booleans() | st.integers() | st.sampled_from(["", "stop", "length"])
_objects = st.dictionaries(st.sampled_from(["request_type", "ctx_usage", "x"]), _odd) | _odd
_choices = st.fixed_dictionaries(
    {},
    optional={
        "index": _odd, "finish_reason": _odd, "text": _odd, "message": _objects, "logprobs": _objects,
        "disaggregated_params": _objects, "token_ids": st.lists(st.integers(0, 9)) | _odd,
    },
)  # fmt: skip
_answers = st.fixed_dictionaries(
    {},
    optional={
        "id": _odd, "object": st.just("chat.completion") | _odd, "usage": _objects, "error": _objects,
        "choices": st.lists(_choices, max_size=2) | _objects,
        "prompt_token_ids": st.lists(st.integers() | st.lists(st.integers())) | _odd,
    },
)  # fmt: skip


@given(answer=_answers | _odd)
def test_any_prefill_answer_is_read_or_refused_by_field(answer: object) -> None:
    fields: list[str | None] = []
    try:
        event = PrefillReader(engine_request().token_ids)(json.dumps(answer).encode())
        if event.kv_transfer_params is not None:
            request = engine_request(kind=Leg.DECODE, kv_transfer_params=dict(event.kv_transfer_params))
            call = call_of(request, has_shared_ids=False)
            assert call.answered or json.loads(call.body)
    except ProtocolError as error:
        fields.append(error.param)
    assert all(fields)


@given(
    params=st.fixed_dictionaries(
        {},
        optional={
            "answer": _answers.map(json.dumps) | _objects,
            "disaggregated_params": _objects,
            "usage": _objects,
        },
    )
)
@pytest.mark.parametrize("stream", [True, False])
def test_any_transfer_params_are_sent_on_or_an_engine_failure(
    stream: bool, params: dict[str, object]
) -> None:
    call = client_call({**CHAT, "stream": stream})
    with suppress(EngineFailed):
        call_of(engine_request(kind=Leg.DECODE, call=call, kv_transfer_params=params), has_shared_ids=True)


def test_error_in_a_prefill_answer_is_read_as_an_error() -> None:
    event = PrefillReader(engine_request().token_ids)(b'{"error":{"message":"no","code":400}}')
    assert event.error is not None


@pytest.mark.parametrize("params", [{}, {"remote_engine_id": "x"}, {"disaggregated_params": 7}])
def test_transfer_params_of_another_engine_kind_are_an_engine_failure(params: dict[str, object]) -> None:
    with pytest.raises(EngineFailed):
        asked(engine_request(kind=Leg.DECODE, call=client_call(CHAT), kv_transfer_params=params))


def test_answer_ended_by_its_first_token_needs_no_decode_engine() -> None:
    call = call_of(decode({**CHAT, "stream": False}, ENDED), has_shared_ids=True)
    assert call.answered is not None
    reported, was = json.loads(call.answered), json.loads(ENDED)
    was["choices"][0]["disaggregated_params"] = None
    assert reported == {**was, "prompt_token_ids": None}
    assert call.reader()(call.answered).finish is FinishReason.STOP


@pytest.mark.parametrize("has_usage", [False, True])
def test_answer_ended_by_its_first_token_is_streamed_if_asked(has_usage: bool) -> None:
    body = {**CHAT, "stream_options": USAGE} if has_usage else CHAT
    call = call_of(decode(body, ENDED), has_shared_ids=True)
    assert call.answered is not None
    *events, done, nothing = call.answered.split(b"\n\n")
    first, *rest = (json.loads(event.removeprefix(b"data: ")) for event in events)
    assert (done, nothing) == (b"data: [DONE]", b"")
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["finish_reason"] == "stop"
    assert first["choices"][0]["delta"]["role"] == "assistant"
    assert [event["usage"] for event in rest] == ([json.loads(ENDED)["usage"]] if has_usage else [])
    assert call.reader()(b"").finish is FinishReason.STOP


def test_token_completion_ended_by_its_first_token_has_that_token() -> None:
    ended = changed(CONTEXT, finish_reason="stop", token_ids=[606], text="")
    call = call_of(decode(None, ended), has_shared_ids=True)
    assert call.answered is not None
    event = call.reader()(call.answered)
    assert (event.token_ids, event.finish) == ((606,), FinishReason.STOP)
    assert call.reading == AnswerReading(passes_raw=False)

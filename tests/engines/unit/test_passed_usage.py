"""What engines count of a call on each route that passes, streamed and whole, as vLLM and SGLang write it."""

import json
from typing import Any

import pytest

from kvrouter.core.requests import CallRoute, ClientCall, FinishReason
from kvrouter.engines.openai.passed import passed_call

WHOLE: list[tuple[CallRoute, dict[str, Any], tuple[int, int | None]]] = [
    (
        CallRoute.MESSAGES,
        {"usage": {"input_tokens": 32, "output_tokens": 2, "cache_read_input_tokens": 320}},
        (352, 320),
    ),
    (
        CallRoute.MESSAGES,
        {
            "usage": {
                "input_tokens": 0,
                "output_tokens": 2,
                "cache_read_input_tokens": 320,
                "cache_creation_input_tokens": 32,
            }
        },
        (352, 320),
    ),
    (CallRoute.MESSAGES, {"usage": {"input_tokens": 352, "output_tokens": 2}}, (352, None)),
    (
        CallRoute.MESSAGES,
        {"usage": {"input_tokens": 352, "output_tokens": 2, "cache_read_input_tokens": 0}},
        (352, 0),
    ),
    (
        CallRoute.RESPONSES,
        {"usage": {"input_tokens": 352, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 320}}},
        (352, 320),
    ),
    (
        CallRoute.GENERATE,
        {"meta_info": {"prompt_tokens": 352, "cached_tokens": 320, "finish_reason": {}}},
        (352, 320),
    ),
]


@pytest.mark.parametrize(("route", "answer", "counted"), WHOLE)
def test_usage_is_counted_on_each_passed_route(
    route: CallRoute, answer: dict[str, Any], counted: tuple[int, int | None]
) -> None:
    call = passed_call(ClientCall(route, b"{}", stream=False, resumable=False), {})
    usage = call.reader()(json.dumps(answer).encode()).usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.cached_tokens) == counted


def test_last_usage_of_a_messages_stream_has_all_counts() -> None:
    events = [
        {"type": "message_start", "message": {"usage": {"input_tokens": 352, "output_tokens": 0}}},
        {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "a"}},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "end_turn"},
            "usage": {"input_tokens": 32, "output_tokens": 2, "cache_read_input_tokens": 320},
        },
    ]
    call = passed_call(ClientCall(CallRoute.MESSAGES, b"{}", stream=True, resumable=False), {})
    read = call.reader()
    counted = [read(json.dumps(event).encode()).usage for event in events]
    seen = [
        usage and (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) for usage in counted
    ]
    assert seen == [(352, None, 0), None, (352, 320, 2)]


@pytest.mark.parametrize(
    ("reason", "finish"), [("abort", FinishReason.CANCELLED), ("length", FinishReason.STOP)]
)
def test_one_aborted_chat_of_several_ends_the_call_as_cancelled(reason: str, finish: FinishReason) -> None:
    call = passed_call(ClientCall(CallRoute.CHATS, b"{}", stream=False, resumable=False), {})
    answer = {"choices": [{"finish_reason": "stop"}, {"finish_reason": reason}]}
    assert call.reader()(json.dumps(answer).encode()).finish is finish

"""Answers as OpenAI's own client types read them."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from kvrouter.core.errors import (
    AllWorkersBusy,
    NoEligibleWorker,
    Reason,
    ShuttingDown,
    SloUnreachable,
    Unauthorized,
    UnknownModel,
)
from kvrouter.core.requests import FinishReason, Usage
from kvrouter.frontend.errors import MethodNotAllowed, error_body, error_event, error_headers
from kvrouter.frontend.openai.answers import AnswerFormat, RouteKind, answer_id

USAGE = Usage(prompt_tokens=11, completion_tokens=3, cached_tokens=8)


def answer(kind: RouteKind, *, usage_null: bool = False) -> AnswerFormat:
    return AnswerFormat(
        kind, answer_id=answer_id(kind, "r1"), model="m", created_s=1_700_000_000, usage_null=usage_null
    )


def data_of(event: bytes) -> bytes:
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert event.count(b"\n") == 2
    return event[len(b"data: ") :].strip()


def chunk_of(event: bytes) -> ChatCompletionChunk:
    return ChatCompletionChunk.model_validate_json(data_of(event), strict=True)


def test_openais_client_reads_a_whole_chat_answer() -> None:
    body = answer(RouteKind.CHAT).json_body("Paris", FinishReason.STOP, USAGE, nvext=None)
    read = ChatCompletion.model_validate_json(body, strict=True)
    assert read.id == "chatcmpl-r1"
    assert read.choices[0].message.content == "Paris"
    assert read.choices[0].finish_reason == "stop"
    assert read.usage is not None
    assert read.usage.total_tokens == 14
    assert read.usage.prompt_tokens_details is not None
    assert read.usage.prompt_tokens_details.cached_tokens == 8


def test_openais_client_reads_a_whole_completion_answer() -> None:
    body = answer(RouteKind.COMPLETION).json_body(
        "Paris", FinishReason.LENGTH, USAGE, nvext={"worker_id": {}}
    )
    read = Completion.model_validate_json(body, strict=True)
    assert read.id == "cmpl-r1"
    assert read.choices[0].text == "Paris"
    assert read.choices[0].finish_reason == "length"
    assert msgspec.json.decode(body)["nvext"] == {"worker_id": {}}


@pytest.mark.parametrize("usage_null", [False, True])
def test_openais_client_reads_the_events_of_a_chat(usage_null: bool) -> None:
    of = answer(RouteKind.CHAT, usage_null=usage_null)
    events = [of.first_event(), of.text_event("Pa"), of.text_event_with_usage("ris", USAGE)]
    events += [of.last_event(FinishReason.STOP), of.last_event(FinishReason.STOP, nvext={"a": 1})]
    chunks = [chunk_of(event) for event in events]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].delta.role for chunk in chunks[1:]] == [None] * 4
    assert [chunk.choices[0].delta.content for chunk in chunks[1:]] == ["Pa", "ris", None, None]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, None, "stop", "stop"]
    assert chunks[2].usage is not None
    assert {chunk.id for chunk in chunks} == {"chatcmpl-r1"}
    last = chunk_of(of.usage_event(USAGE))
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.prompt_tokens == 11


def test_openais_client_reads_the_events_of_a_completion() -> None:
    """The client's type has no finish reason of null, and OpenAI sends one; the client does not check."""
    of = answer(RouteKind.COMPLETION)
    assert of.first_event() == b""
    text = msgspec.json.decode(data_of(of.text_event("Pa")))
    assert text["choices"][0] == {"index": 0, "text": "Pa", "logprobs": None, "finish_reason": None}
    assert (text["object"], text["id"]) == ("text_completion", "cmpl-r1")
    last = data_of(of.last_event(FinishReason.LENGTH))
    read = Completion.model_validate_json(last, strict=True)
    assert (read.choices[0].text, read.choices[0].finish_reason) == ("", "length")


@given(st.lists(st.text(alphabet=st.characters(codec="utf-8")), max_size=8), st.sampled_from(RouteKind))
def test_events_decode_back_to_the_text(texts: list[str], kind: RouteKind) -> None:
    of = answer(kind)
    read = []
    for event in map(of.text_event, texts):
        choice = msgspec.json.decode(data_of(event))["choices"][0]
        read.append(choice["delta"]["content"] if kind is RouteKind.CHAT else choice["text"])
    assert read == texts


def test_an_error_names_its_field() -> None:
    body = msgspec.json.decode(error_body(UnknownModel("model: 'x' is not served here", param="model")))
    assert body == {
        "error": {
            "message": "model: 'x' is not served here",
            "type": "invalid_request_error",
            "param": "model",
            "code": "model_not_found",
        }
    }


def test_a_refusal_has_its_counts_and_retry_after() -> None:
    error = NoEligibleWorker(
        "nobody", refusals={Reason.DRAINING: 1, Reason.DOMAIN_MISMATCH: 2}, role="decode", domain="zone"
    )
    body = msgspec.json.decode(data_of(error_event(error)))["error"]
    assert body["code"] == "no_eligible_worker"
    assert body["refusals"] == {"domain_mismatch": 2, "draining": 1}
    assert (body["role"], body["domain"]) == ("decode", "zone")
    assert (b"retry-after", b"1") in error_headers(error)
    busy = AllWorkersBusy("busy", refusals={Reason.BUSY: 3}, retry_after_s=5)
    assert (b"retry-after", b"5") in error_headers(busy)
    late = dict(error_headers(SloUnreachable("late", refusals={Reason.TOO_LATE: 1}, retry_after_s=None)))
    assert (late.get(b"retry-after"), late[b"x-should-retry"]) == (None, b"false")


def test_each_status_has_its_headers() -> None:
    assert (b"retry-after", b"1") in error_headers(ShuttingDown("bye"))
    assert dict(error_headers(Unauthorized("no")))[b"www-authenticate"].startswith(b"Bearer")
    assert dict(error_headers(MethodNotAllowed("no", allow="GET, POST")))[b"allow"] == b"GET, POST"
    assert dict(error_headers(UnknownModel("no"))) == {b"content-type": b"application/json"}

"""What an engine's error answers mean: the table of statuses, and what of them travels to the client."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.core.engine_answer import (
    BODY_MAX_BYTES,
    HEADER_MAX_BYTES,
    HEADERS_MAX,
    HEADERS_MAX_BYTES,
    EngineAnswer,
    Headers,
    passed_headers,
)
from kvrouter.core.errors import ContextLengthExceeded, InvalidRequest, KvrouterError, ProtocolError
from kvrouter.core.ids import DpRank, Slot, WorkerId, WorkerRank
from kvrouter.core.requests import CallRoute, ClientCall, Leg
from kvrouter.engines.openai.answer_events import Failure
from kvrouter.engines.openai.failures import (
    ERROR_CHARS_MAX,
    Blame,
    blame_of,
    failure_inside,
    failure_of,
)
from kvrouter.kernel.routing.interface import Pick
from kvrouter.router.leg_outcomes import lost_leg
from kvrouter.transports.requests.port import (
    EngineFailed,
    EngineFailedLater,
    WorkerDeclined,
    WorkerFull,
    WorkerUnreachable,
)
from tests.testing.scripted_engine import JSON, page

TRTLLM_TOO_LONG = (
    b'{"object":"error","message":"The sum of prompt length (9351.0), query length (0) should not exceed '
    b'max_num_tokens (8192)","type":"BadRequestError","param":null,"code":400}'
)


@pytest.mark.parametrize(
    ("status", "body", "kind", "says", "param"),
    [
        (400, page("vllm-0.32.0-error-context.json"), ContextLengthExceeded, "max_model_len=", "max_tokens"),
        (404, page("vllm-0.32.0-error-model.json"), InvalidRequest, "`nope` does not exist", "model"),
        (400, page("vllm-0.32.0-error-field.json"), InvalidRequest, "valid integer", "body.max_tokens"),
        (400, page("sglang-0.5.23-error-context.json"), ContextLengthExceeded, "of 4096 tokens", None),
        (400, page("trtllm-1.3.0-error-context.json"), ContextLengthExceeded, "max_seq_len", None),
        (400, TRTLLM_TOO_LONG, ContextLengthExceeded, "prompt length", None),
        (422, b'{"detail":[{"loc":["body","n"],"msg":"bad"}]}', InvalidRequest, "'msg': 'bad'", None),
        (413, b"", InvalidRequest, "the engine answered 413", None),
        (404, b'{"detail":"Not Found"}', InvalidRequest, "Not Found", None),
        (400, b"no JSON", InvalidRequest, "no JSON", None),
        (400, b'{"error":{"message":5}}', InvalidRequest, '{"error"', None),
        (429, b'{"error":{"message":"queue"}}', WorkerFull, "answered 429: queue", None),
        (503, b"", WorkerFull, "answered 503", None),
        (401, b'{"error":"Unauthorized"}', WorkerUnreachable, "answered 401", None),
        (500, b'{"error":{"message":"EngineCore died"}}', WorkerUnreachable, "EngineCore died", None),
        (502, b"<html>", WorkerUnreachable, "answered 502", None),
    ],
)  # fmt: skip
def test_error_answer_gives_its_error_class_message_and_field(
    status: int, body: bytes, kind: type[KvrouterError], says: str, param: str | None
) -> None:
    failure = failure_of(status, body)
    assert isinstance(failure, kind)
    assert isinstance(failure, WorkerFull) is (kind is WorkerFull)
    assert isinstance(failure, ContextLengthExceeded) is (kind is ContextLengthExceeded)
    assert says in failure.message
    assert failure.param == param


def test_long_engine_error_message_is_truncated() -> None:
    failure = failure_of(400, json.dumps({"error": {"message": "é" * 10_000}}).encode())
    assert len(failure.message) == ERROR_CHARS_MAX


CALL, FULL, DECLINED, ENGINE = Blame.CALL, Blame.FULL, Blame.DECLINED, Blame.ENGINE
KINDS = {CALL: InvalidRequest, FULL: WorkerFull, DECLINED: WorkerDeclined, ENGINE: EngineFailed}
BLAMES = {
    CALL: (201, 202, 204, 400, 402, 404, 405, 406, 409, 413, 415, 422, 431, 451, 418, 498, 501, 505),
    FULL: (429, 503),
    DECLINED: (403, 408, 421, 425, 499),
    ENGINE: (300, 301, 302, 304, 305, 307, 308, 399, 401, 500, 502, 504, 507, 529, 599),
}


@pytest.mark.parametrize(("blame", "status"), [(blame, each) for blame, of in BLAMES.items() for each in of])
def test_each_status_blames_the_call_or_the_engine_by_the_table(blame: Blame, status: int) -> None:
    failure = failure_of(status, b"words", ((b"Retry-After", b"7"), (b"Location", b"http://10.0.0.1/")))
    assert blame_of(status) is blame
    assert type(failure) is KINDS[blame]
    passes = None if 300 <= status < 400 else EngineAnswer(status, ((b"retry-after", b"7"),), b"words")
    assert failure.answer == passes


@given(status=st.integers(200, 599).filter(lambda status: status != 200 and not 300 <= status < 400))
def test_error_answer_of_any_status_passes_byte_for_byte(status: int) -> None:
    body = bytes(range(256))
    failure = failure_of(status, body, ((b"Content-Type", b"text/html"),))
    assert failure.http_status == status
    assert failure.answer == EngineAnswer(status, ((b"content-type", b"text/html"),), body)


@given(
    st.lists(
        st.tuples(st.sampled_from([b"Allow", b"x-ratelimit-reset", b"Set-Cookie", b"x\r\ny"]), st.binary())
        | st.tuples(st.binary(), st.binary())
    )
)
def test_only_headers_that_clients_act_on_pass(headers: list[tuple[bytes, bytes]]) -> None:
    passed = passed_headers(tuple(headers))
    assert len(passed) <= HEADERS_MAX
    for name, value in passed:
        assert name == b"allow" or name.startswith(b"x-ratelimit-") or (name, value) in headers
        assert not {0x0A, 0x0D} & set(value)
    assert passed_headers(passed) == passed


def test_headers_of_a_good_answer_may_be_longer_than_those_of_an_error() -> None:
    def named(value: bytes) -> Headers:
        return ((b"metadata", value), (b"allow", b"POST"))

    longest_of_error = named(b"x" * (HEADER_MAX_BYTES - len("metadata")))
    longest = named(b"x" * (HEADERS_MAX_BYTES - len("metadata") - len("allowPOST")))
    assert passed_headers(longest_of_error, of_error=True) == longest_of_error
    assert passed_headers(longest, of_error=True) == longest[1:]
    assert passed_headers(longest) == longest
    too_long = named(longest[0][1] + b"x")
    assert passed_headers(too_long) == too_long[:1]


def test_too_long_error_body_is_replaced_by_an_error_that_says_so() -> None:
    longest = b"x" * BODY_MAX_BYTES
    html = ((b"Content-Type", b"text/html"), (b"Retry-After", b"7"))
    whole = failure_of(500, longest, html).answer
    assert whole is not None
    assert whole.body == longest
    cut = failure_of(500, longest + b"x", html).answer
    assert cut is not None
    assert cut.headers == ((b"content-type", JSON.encode()), (b"retry-after", b"7"))
    words = json.loads(cut.body)["error"]["message"]
    assert words.startswith("x" * ERROR_CHARS_MAX)
    assert "kvrouter cut it" in words


@pytest.mark.parametrize("code", [400, 404, 429, 500, 503, 7, "invalid", None])
def test_error_event_in_place_of_an_answer_is_classified_by_its_code(code: int | str | None) -> None:
    answer = EngineAnswer(200, body=b"data: ...", is_events=True)
    failure = failure_inside(Failure("no", code, "n"), answer)
    assert type(failure) is (InvalidRequest if code in (400, 404) else EngineFailedLater)
    assert failure.answer is answer
    assert failure.http_status == failure.status_hint


def test_circuit_counts_only_failures_that_blame_the_engine() -> None:
    pick = picked()
    for blame in (FULL, DECLINED, ENGINE):
        for status in BLAMES[blame]:
            lost = lost_leg(pick, failure_of(status, b""))
            assert (not (lost.full or lost.blameless)) is (blame is ENGINE)


@pytest.mark.parametrize("route", CallRoute)
def test_a_route_unknown_to_an_older_worker_is_no_failure_of_it(route: CallRoute) -> None:
    error = ProtocolError(f"request: Invalid enum value {route.value!r} - at `$.call.route`", param="request")
    lost = lost_leg(picked(), error, ClientCall(route, b"{}", stream=False, resumable=False))
    assert lost.blameless is (route not in (CallRoute.CHAT, CallRoute.COMPLETION))
    assert not lost_leg(picked(), error).blameless


def picked() -> Pick:
    rank = WorkerRank(WorkerId(1), DpRank(0))
    return Pick(Slot(0), rank, Leg.AGGREGATED, 0, 0.0, 0.0, 0.0, 1.0, 0.0, 1)

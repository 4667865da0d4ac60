"""Values as engines read them, and calls of which the router reads what it can."""

import json

import pytest

from kvrouter.core.errors import InvalidRequest
from kvrouter.core.lax import UNKNOWN, lax_bool, lax_int, lax_json, lax_texts
from kvrouter.core.requests import CallRoute, EngineChunk, FinishReason, Leg
from kvrouter.frontend.openai.passthrough import is_surely_unreadable
from tests.frontend.unit.test_frontend_passthrough import taking
from tests.testing.body_parsers import parse_passthrough
from tests.testing.frontend_harness import error_of, running_frontend
from tests.testing.router_harness import MODEL, card
from tests.testing.scripted_transport import ScriptedStream

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
WHOLE = b'{"id":"theirs"}'


@pytest.mark.parametrize("yes", [True, 1, 1.0, "true", "TRUE", "on", "yes", "y", "t", "1"])
def test_true_values_are_read(yes: object) -> None:
    assert lax_bool(yes) is True


@pytest.mark.parametrize("no", [False, 0, 0.0, "false", "Off", "no", "n", "f", "0"])
def test_false_values_are_read(no: object) -> None:
    assert lax_bool(no) is False


@pytest.mark.parametrize("odd", [2, 0.5, "", "maybe", [], {}, [True]])
def test_an_invalid_flag_is_unknown(odd: object) -> None:
    assert lax_bool(odd) is UNKNOWN


@pytest.mark.parametrize(
    ("value", "read"),
    [
        (16, 16), (16.0, 16), ("16", 16), ("16.0", 16), (True, 1), (-3, -3), (10**30, 10**30), (None, None),
        (16.5, UNKNOWN), ("many", UNKNOWN), ("", UNKNOWN), ([16], UNKNOWN), ({}, UNKNOWN),
        (float("inf"), UNKNOWN), ("9" * 5000, UNKNOWN),
    ],
)  # fmt: skip
def test_lax_int_reads_whole_numbers(value: object, read: object) -> None:
    assert lax_int(value) == read


@pytest.mark.parametrize(
    ("value", "read"),
    [
        (None, ()), ("a", ("a",)), ([], ()), (["a", "b"], ("a", "b")),
        (5, UNKNOWN), (["a", 5], UNKNOWN), ({"a": 1}, UNKNOWN),
    ],
)  # fmt: skip
def test_lax_texts_reads_lists_of_strings(value: object, read: object) -> None:
    assert lax_texts(value) == read


@pytest.mark.parametrize("odd", [b'"\\ud800"', b"1e999", b'["\\udfff"]'])
def test_an_undecodable_value_is_unknown(odd: bytes) -> None:
    assert lax_json(odd) is UNKNOWN


@pytest.mark.parametrize(
    ("fields", "max_tokens", "streams"),
    [
        ({"max_tokens": 16.0, "stream": "true"}, 16, True),
        ({"max_tokens": "16", "stream": 1}, 16, True),
        ({"max_tokens": True, "stream": "on"}, 1, True),
        ({"max_tokens": None, "stream": None}, None, False),
        ({"max_tokens": -4, "stream": 0}, 1, False),
        ({"max_tokens": 10**12, "stream": "no"}, 10**12, False),
        ({"max_tokens": "many", "stream": "maybe"}, None, False),
        ({"max_tokens": [], "stream": {}}, None, False),
        ({"max_tokens": 5, "max_completion_tokens": "7"}, 7, False),
    ],
)
def test_loosely_typed_fields_are_read_and_passed_unchanged(
    fields: dict[str, object], max_tokens: int | None, streams: bool
) -> None:
    body = json.dumps({**CHAT, **fields}).encode()
    passed = parse_passthrough(CallRoute.CHAT, body)
    assert (passed.call.max_tokens, passed.call.stream, passed.client_call.stream) == (
        max_tokens, streams, streams,
    )  # fmt: skip
    assert passed.client_call.body == body


@pytest.mark.parametrize(
    "field",
    [
        {"stop": 5}, {"stop": ["a", 5]}, {"stream": "maybe"}, {"max_tokens": "many"},
        {"stream_options": "x"}, {"stream_options": {"include_usage": "maybe"}},
    ],
)  # fmt: skip
def test_a_partly_read_call_is_not_resumed(field: dict[str, object]) -> None:
    passed = parse_passthrough(CallRoute.CHAT, json.dumps({**CHAT, **field}).encode())
    assert not passed.client_call.resumable


@pytest.mark.parametrize("salt", [5, ["a"], {}, True])
def test_an_unreadable_salt_disables_cache_prediction(salt: object) -> None:
    passed = parse_passthrough(CallRoute.CHAT, json.dumps({**CHAT, "cache_salt": salt}).encode())
    assert (passed.chat, passed.prompt, passed.call.cache_namespace) == (None, None, None)
    assert json.loads(passed.client_call.body)["cache_salt"] == salt
    text = json.dumps({"model": "m", "prompt": "a", "cache_salt": salt}).encode()
    assert parse_passthrough(CallRoute.COMPLETION, text).prompt is None


def answers(stream: ScriptedStream) -> None:
    stream.feed(EngineChunk(raw=WHOLE, finish=FinishReason.STOP))


NO_JSON = [b"", b"{", b'{"model":', b"[1]", b"null", b'"text"', b'{"a":1}x', b'{"prompt":"\xff"}', b"a=b"]
PATHS = ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/embeddings"]


NAN = '"a":[NaN,Infinity,-Infinity,"\u00fc"]'


@pytest.mark.parametrize("path", PATHS)
async def test_an_invalid_body_reaches_the_engine_of_the_only_model(path: str) -> None:
    async with running_frontend(taking(1), script=answers) as frontend:
        for nth, body in enumerate(NO_JSON):
            response = await frontend.http.post(path, content=body)
            assert (response.status_code, response.content) == (200, WHOLE), body
            call = (await frontend.plane.wait_for(Leg.AGGREGATED, nth=nth)).request.call
            assert call is not None
            assert (call.route, call.body) == (path, body)


@pytest.mark.parametrize("extra", [NAN, '"a":"\u00fc"'])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-16-be", "utf-32"])
async def test_bodies_only_python_decodes_are_checked_for_reserved_fields(encoding: str, extra: str) -> None:
    async with running_frontend(taking(1), script=answers) as frontend:
        body = f"{{{extra}}}"
        response = await frontend.http.post(PATHS[0], content=body.encode(encoding))
        assert (response.status_code, response.content) == (200, WHOLE)
        call = (await frontend.plane.wait_for(Leg.AGGREGATED)).request.call
        assert call is not None
        assert call.body == body.encode()
        for name in ("kv_transfer_params", "data_parallel_rank"):
            body = f'{{{extra},"{name}":{{}}}}'
            response = await frontend.http.post(PATHS[0], content=body.encode(encoding))
            assert (response.status_code, error_of(response)["param"]) == (400, name)
        assert len(frontend.plane.opened) == 1


async def test_token_engines_refuse_non_finite_numbers() -> None:
    async with running_frontend(card(1)) as frontend:
        response = await frontend.http.post(PATHS[0], content=b'{"model":"%s","top_p":NaN}' % MODEL.encode())
        assert (response.status_code, error_of(response)["param"]) == (400, "top_p")


def test_only_short_bodies_are_surely_unreadable() -> None:
    assert is_surely_unreadable(b"{" * 65_536)
    assert not is_surely_unreadable(b"{" * 65_537)


async def test_an_invalid_body_for_several_models_or_token_engines_is_refused() -> None:
    async with running_frontend(card(1), script=answers) as frontend:
        for body in NO_JSON:
            error = error_of(await frontend.http.post(PATHS[0], content=body))
            assert "JSON" in str(error["message"])
        assert frontend.plane.opened == []


@pytest.mark.parametrize("named", [{}, {"model": None}, {"model": ""}, {"model": 5}, {"model": ["a"]}])
@pytest.mark.parametrize("path", PATHS)
async def test_a_call_without_a_model_goes_to_the_only_model(path: str, named: dict[str, object]) -> None:
    body = json.dumps({"prompt": "a", "messages": CHAT["messages"], **named}).encode()
    async with running_frontend(taking(1), script=answers) as frontend:
        response = await frontend.http.post(path, content=body)
        assert (response.status_code, response.content) == (200, WHOLE)
        sent = (await frontend.plane.wait_for(Leg.AGGREGATED)).request
    assert sent.call is not None
    assert (sent.model, sent.call.body) == (MODEL, body)


async def test_an_unknown_or_invalid_model_name_is_a_404() -> None:
    async with running_frontend(taking(1)) as frontend:
        for name in ("x" * 257, "x" * 5000, "other"):
            response = await frontend.http.post(PATHS[0], json={**CHAT, "model": name})
            assert (response.status_code, error_of(response)["param"]) == (404, "model")


async def test_a_token_call_without_a_model_goes_to_the_only_model() -> None:
    async with running_frontend(card(1)) as frontend:
        for path, body in ((PATHS[0], {"messages": CHAT["messages"]}), (PATHS[1], {"prompt": "a"})):
            for named in ({}, {"model": None}, {"model": ""}):
                explained = await frontend.http.post("/v1/route/explain", json={**body, **named})
                assert explained.status_code == 200, explained.text
                asks = {**body, **named, "nvext": {"annotations": ["query_instance_id"]}}
                answer = await frontend.http.post(path, json=asks)
                assert (answer.status_code, answer.json()["model"]) == (200, MODEL)


def test_a_salt_over_the_routers_limit_is_refused() -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_passthrough(CallRoute.CHAT, json.dumps({**CHAT, "cache_salt": "s" * 1025}).encode())
    assert refused.value.param == "cache_salt"

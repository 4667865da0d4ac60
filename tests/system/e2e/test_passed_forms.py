"""Routes whose calls are forms with files: they pass as they are, by load, with retries and metrics."""

import json
from contextlib import AsyncExitStack

import httpx
import openai
import pytest

from kvrouter.frontend.openai.passed_routes import PASSED_ROUTES
from tests.system.e2e.test_passed_routes import before, behind_loss, pieces, whole
from tests.testing.mock_fleet import uniform_fleet
from tests.testing.mock_server import MockServer, mock_server
from tests.testing.scripted_engine import AnswerEnd, ScriptedAnswer, scripted_engine

FORMS = [route.route.value for route in PASSED_ROUTES if route.is_form]
TYPE = "multipart/form-data; boundary=b"
AUDIO = bytes(range(256)) * 1500


def form(*fields: tuple[str, str]) -> bytes:
    parts = [f'--b\r\nContent-Disposition: form-data; name="{k}"\r\n\r\n{v}\r\n'.encode() for k, v in fields]
    file = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n' + AUDIO
    return b"".join((*parts, file, b"\r\n--b--\r\nepilogue"))


async def post(here: MockServer, path: str, data: bytes, **headers: str) -> httpx.Response:
    sent = {"content-type": TYPE, **{name.replace("_", "-"): value for name, value in headers.items()}}
    return await here.http.post(path, content=data, headers=sent)


@pytest.mark.parametrize("path", FORMS)
async def test_a_form_and_its_answer_pass_unchanged(path: str) -> None:
    async with scripted_engine() as engine, before(engine) as here:
        said = {"text": "hi", "usage": {"type": "duration", "seconds": 1}}
        engine.answers.append(whole(said))
        data = form(("model", "tiny"), ("language", "en"), ("field_of_tomorrow", "x"))
        response = await post(here, path, data)
        assert response.status_code == 200
        assert response.content == json.dumps(said).encode()
        assert response.headers["content-type"] == "application/json"
        assert response.headers["x-kvrouter-decode-worker"] == "1"
        (got,) = engine.calls
        assert (got.path, got.raw) == (path, data)
        assert got.headers["content-type"] == 'multipart/form-data; boundary="b"'
        metrics = await here.metrics()
        assert metrics.value("requests_total", route=path, model="tiny", status="200") == 1


async def test_openais_client_transcribes_a_file() -> None:
    async with scripted_engine() as engine, before(engine) as here:
        engine.answers.append(whole({"text": "hi"}))
        answer = await here.openai.audio.transcriptions.create(model="tiny", file=("a.wav", AUDIO))
        assert answer.text == "hi"
        assert AUDIO in engine.calls[0].raw
        engine.answers.append(ScriptedAnswer((b"bare text",), content_type="text/plain"))
        text = await here.openai.audio.transcriptions.create(
            model="tiny", file=("a.wav", AUDIO), response_format="text"
        )
        assert text == "bare text"
        engine.answers.append(ScriptedAnswer((b"",), content_type="text/plain"))
        silent = await post(here, FORMS[0], form(("model", "tiny"), ("response_format", "text")))
        assert (silent.status_code, silent.content) == (200, b"")
        assert silent.headers["content-type"].startswith("text/plain")


CHUNKS = (
    'data: {"object":"transcription.chunk","choices":[{"delta":{"content":"hi"}}]}\n\n',
    'data: {"object":"transcription.chunk","choices":[{"delta":{"content":""},"finish_reason":"stop"}]}\n\n',
    "data: [DONE]\n\n",
)
EVENTS = (
    'data: {"type":"transcript.text.delta","delta":"hi"}\n\n',
    'data: {"type":"transcript.text.done","text":"hi","usage":{"input_tokens":7,"output_tokens":2}}\n\n',
)


@pytest.mark.parametrize("events", [CHUNKS, EVENTS])
@pytest.mark.parametrize("written", ["true", "True", "1"])
async def test_events_of_a_form_call_pass_unchanged(events: tuple[str, ...], written: str) -> None:
    async with scripted_engine() as engine, before(engine) as here:
        engine.answers.append(ScriptedAnswer(pieces(*events)))
        response = await post(here, FORMS[0], form(("model", "tiny"), ("stream", written)))
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.text == "".join(events)


@pytest.mark.parametrize("events", [CHUNKS, EVENTS])
async def test_a_cut_stream_ends_with_an_error(events: tuple[str, ...]) -> None:
    async with scripted_engine() as engine, before(engine) as here:
        engine.answers.append(ScriptedAnswer(pieces(events[0]), ends=AnswerEnd.HELD))
        call = {"content": form(("model", "tiny"), ("stream", "true")), "headers": {"content-type": TYPE}}
        rest = await behind_loss(here, engine, FORMS[0], events[0], **call)
        assert json.loads(rest.removeprefix("data: "))["error"]["code"] == "worker_failed"


@pytest.mark.parametrize("events", [CHUNKS, EVENTS])
async def test_a_stream_without_its_last_event_passes_unchanged(events: tuple[str, ...]) -> None:
    """Also where its last event is missing."""
    async with scripted_engine() as engine, before(engine) as here:
        engine.answers.append(ScriptedAnswer(pieces(events[0]), ends=AnswerEnd.WHOLE))
        response = await post(here, FORMS[0], form(("model", "tiny"), ("stream", "true")))
        assert response.text == events[0]


async def test_a_form_without_a_begun_answer_is_retried_on_another_worker() -> None:
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(scripted_engine()) for _ in range(2)]
        here = await stack.enter_async_context(before(*engines))
        data = form(("model", "tiny"))
        engines[0].answers.extend(
            (ScriptedAnswer(ends=AnswerEnd.REFUSED),) * 2
        )  # on a kept connection, and a fresh one
        engines[1].answers.extend((whole({"text": "hi"}),) * 20)
        while not engines[0].calls:
            assert (await post(here, FORMS[0], data)).json() == {"text": "hi"}
        assert (await here.metrics()).value("retries_total", model="tiny") == 1
        assert {call.raw for engine in engines for call in engine.calls} == {data}


async def test_a_form_without_a_model_passes_and_an_unknown_one_is_a_404() -> None:
    async with scripted_engine() as engine, before(engine) as here:
        engine.set_json("/v1/models", {"data": [{"id": "other-name", "root": "r", "max_model_len": 2048}]})
        engine.answers.append(whole({"text": "hi"}))
        assert (await post(here, FORMS[0], form(("language", "en")))).status_code == 200
        assert engine.calls[0].raw == form(("language", "en"))
        unknown = await post(here, FORMS[0], form(("model", "nobody")))
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kv_transfer_params", '{"remote_host":"h"}'),
        ("bootstrap_host", "h"),
        ("data_parallel_rank", "1"),
        ("vllm_xargs", "{}"),
        ("nvext", "{}"),
        ("cache_salt", "a"),
    ],
)
async def test_reserved_form_fields_are_refused(field: str, value: str) -> None:
    async with scripted_engine() as engine, before(engine) as here:
        response = await post(here, FORMS[0], form(("model", "tiny"), (field, value)))
        assert (response.status_code, response.json()["error"]["param"]) == (400, field)
        assert not engine.calls


async def test_a_form_refuses_a_cache_salt_and_keeps_its_pin() -> None:
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(scripted_engine()) for _ in range(2)]
        here = await stack.enter_async_context(before(*engines))
        data = form(("model", "tiny"))
        salted = await post(here, FORMS[0], data, x_tenant_id="a")
        assert (salted.status_code, salted.json()["error"]["param"]) == (400, "cache_salt")
        for worker, engine in enumerate(engines, start=1):
            engine.answers.append(whole({"text": "hi"}))
            pinned = await post(here, FORMS[0], data, x_worker_instance_id=str(worker))
            assert pinned.headers["x-kvrouter-decode-worker"] == str(worker)


async def test_hostile_bodies_are_answered_with_a_4xx() -> None:
    async with scripted_engine() as engine, before(engine) as here:
        for data, content_type, status in (
            (b"{}", "application/json", 415),
            (b"", TYPE, 400),
            (form(("model", "tiny"))[:-30], TYPE, 400),
            (b"--b\r\nx: y\r\n\r\n" + b"\r\n--bx" * 100_000, TYPE, 400),
            (form(*(("a", "b") for _ in range(99))), TYPE, 400),
        ):
            response = await here.http.post(FORMS[0], content=data, headers={"content-type": content_type})
            assert response.status_code == status
        assert not engine.calls


async def test_engines_that_take_tokens_serve_no_forms() -> None:
    async with mock_server(uniform_fleet(replicas=1)) as here:
        with pytest.raises(openai.NotFoundError) as refused:
            await here.openai.audio.transcriptions.create(model="mock", file=("a.wav", AUDIO))
        assert refused.value.code == "route_not_served"

"""Each error that a client gets counts in ``kvrouter_errors_total``, under its code and its model."""

import asyncio
from collections import Counter

import httpx

from kvrouter.settings.tree import FrontendSettings
from tests.testing.mock_fleet import fleet_file
from tests.testing.mock_server import MODEL, MockServer, mock_server

ONE = "version: 1\nmodels: [{name: mock}]\nworkers: [{name: w}]\n"
JSON = {"content-type": "application/json"}

REFUSED_CALLS: list[tuple[str, bytes, str]] = [
    ("/v1/completions", b'{"model":"mock","prompt":"a","n":-1}', MODEL),
    ("/v1/completions", b'{"model":"mock","prompt":"a","max_tokens":99999999}', MODEL),
    ("/v1/completions", b'{"model":"mock","prompt":""}', MODEL),
    ("/v1/completions", b'{"model":"mock","prompt":"a","temperature":NaN}', "unknown"),
    ("/v1/completions", b'{"model":"nobody","prompt":"a"}', "unknown"),
    ("/v1/chat/completions", b'{"model":"mock","messages":[]}', MODEL),
    ("/v1/chat/completions", b'{"model":"mock","messages":[{"role":"user"}]}', MODEL),
    (
        "/v1/chat/completions",
        b'{"model":"mock","messages":[{"role":"user","content":"a"}],"tools":[1]}',
        MODEL,
    ),
    ("/v1/chat/completions", b"{", "unknown"),
    (
        "/v1/chat/completions",
        b'{"model":"mock","messages":[{"role":"user","content":"a"}],'
        b'"nvext":{"routing_constraints":{"required_taints":["gpu=none"]}}}',
        MODEL,
    ),
]
OTHER_REQUESTS = [
    ("GET", "/v1/completions"),
    ("DELETE", "/v1/models"),
    ("GET", "/v1/nothing"),
    ("GET", "/v1/models/nobody"),
]
OPERATORS_CALLS = [
    ("GET", "/v1/decisions/nobody", b"", "/v1/decisions/{request_id:path}", "decision_not_found"),
    ("POST", "/v1/route/explain", b"{", "/v1/route/explain", "invalid_request"),
    ("POST", "/v1/route/explain", b'{"model":"other","prompt":"a"}', "/v1/route/explain", "model_not_found"),
    ("POST", "/v1/cordons", b'{"level":"worker","name":1}', "/v1/cordons", "nobody_left"),
    ("POST", "/v1/cordons", b'{"level":"rack","name":"a"}', "/v1/cordons", "not_found"),
]
NOT_HTTP = b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n"


async def test_every_error_answer_is_counted_once_under_its_code_and_model() -> None:
    wanted: Counter[tuple[str, str]] = Counter()

    def note(reply: httpx.Response, model: str) -> None:
        assert reply.status_code >= 400, reply.text
        wanted[model, reply.json()["error"]["code"]] += 1

    async with mock_server(fleet_file(ONE), frontend=FrontendSettings(body_max_bytes=10_000)) as here:
        for path, body, model in REFUSED_CALLS:
            note(await here.http.post(path, content=body, headers=JSON), model)
        for method, path in OTHER_REQUESTS:
            note(await here.http.request(method, path), "unknown")
        note(await here.http.post("/v1/completions", content=b"x" * 10_001), "unknown")
        await _send_raw(here, NOT_HTTP)
        wanted["unknown", "invalid_request"] += 1
        metrics = await here.metrics()
        counted = {key: metrics.value("errors_total", model=key[0], code=key[1]) for key in wanted}
        assert counted == wanted
        assert metrics.value("errors_total") == wanted.total()
        unhandled = len([path for _, path in OTHER_REQUESTS if not path.endswith("/nobody")]) + 2
        assert metrics.value("requests_total") == len(REFUSED_CALLS) + unhandled
        named = sum(1 for _, _, model in REFUSED_CALLS if model == MODEL)
        assert metrics.value("requests_total", model=MODEL) == named


async def test_an_error_of_an_operators_own_call_is_no_refusal() -> None:
    async with mock_server(fleet_file(ONE)) as here:
        for method, path, body, route, code in OPERATORS_CALLS:
            reply = await here.http.request(method, path, content=body, headers=JSON)
            assert reply.json()["error"]["code"] == code
            assert (await here.metrics()).value("admin_errors_total", route=route, code=code) == 1
        assert (await here.metrics()).value("errors_total") == 0
        assert (await here.http.get("/v1/refusals")).json() == {"worker_ranks": [], "answers": []}


async def test_an_error_in_the_middle_of_a_stream_is_counted() -> None:
    async with mock_server(fleet_file(ONE + "speedup: 1\n")) as here:
        body = {
            "model": MODEL,
            "prompt": "a b c",
            "max_tokens": 2000,
            "stream": True,
            "seed": 1,
            "temperature": 1,
        }
        async with here.http.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            lines = response.aiter_lines()
            await anext(lines)
            await here.kill(response.headers["x-kvrouter-decode-worker"])
            rest = "".join([line async for line in lines])
        assert '"error"' in rest
        assert (await here.metrics()).value("errors_total", model=MODEL) == 1


async def _send_raw(here: MockServer, data: bytes) -> None:
    host, port = here.system.address
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(data)
    assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
    writer.close()
    await writer.wait_closed()

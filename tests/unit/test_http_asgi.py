"""Starlette behind the bridge, on the connections that also carry streams."""

import asyncio
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request as StarletteRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from kvrouter.frontend.http import AsgiBridge, HttpEvent, HttpServer, Request, Responder


async def show(request: StarletteRequest) -> Response:
    body = await request.body()
    return JSONResponse(
        {
            "method": request.method,
            "path": request.url.path,
            "raw_path": request.scope["raw_path"].decode(),
            "q": request.query_params.get("q"),
            "header": request.headers.get("x-thing"),
            "body": body.decode(),
            "client": request.client.host if request.client else None,
            "state": request.state.greeting,
        }
    )


async def pieces(request: StarletteRequest) -> Response:
    return StreamingResponse((part for part in ("a", "b", "c")), media_type="text/plain")


async def fail(request: StarletteRequest) -> Response:
    raise ValueError("broken on purpose")


async def large(request: StarletteRequest) -> Response:
    return PlainTextResponse("x" * 2000)


class Stamp(BaseHTTPMiddleware):
    async def dispatch(self, request: StarletteRequest, call_next: RequestResponseEndpoint) -> Response:
        response = await call_next(request)
        response.headers["x-stamp"] = "1"
        return response


APP = Starlette(
    routes=[
        Route("/show/{rest:path}", show, methods=["GET", "POST"]),
        Route("/pieces", pieces),
        Route("/fail", fail),
        Route("/large", large),
    ],
    middleware=[Middleware(Stamp)],
)


async def serve_app(**options: Any) -> tuple[HttpServer, httpx.AsyncClient, list[HttpEvent]]:
    bridge = AsgiBridge(APP, state={"greeting": "hello"}, **options)
    events: list[HttpEvent] = []

    async def handler(request: Request, responder: Responder) -> None:
        if request.path != "/stream":
            await bridge(request, responder)
            return
        stream = responder.start_stream(200)
        stream.write(b"streamed")
        stream.end()

    server = HttpServer(handler, observer=events.append)
    await server.serve()
    host, port = server.addresses[0]
    return server, httpx.AsyncClient(base_url=f"http://{host}:{port}", trust_env=False), events


async def test_routes_and_streams_share_a_connection() -> None:
    server, client, events = await serve_app()
    async with client:
        response = await client.post("/show/a%20b?q=1", content="text", headers={"X-Thing": "t"})
        assert response.json() == {
            "method": "POST",
            "path": "/show/a b",
            "raw_path": "/show/a%20b",
            "q": "1",
            "header": "t",
            "body": "text",
            "client": "127.0.0.1",
            "state": "hello",
        }
        assert response.headers["x-stamp"] == "1"
        assert (await client.get("/stream")).text == "streamed"
        answer = await client.get("/pieces")
        assert (answer.text, answer.headers["content-length"]) == ("abc", "3")
        assert (await client.get("/absent")).status_code == 404
        assert (await client.delete("/pieces")).status_code == 405
        head = await client.head("/pieces")
        assert (head.status_code, head.content) == (200, b"")
    await server.drain(1)
    assert events.count(HttpEvent.CONNECTION_OPENED) == 1
    assert HttpEvent.HANDLER_FAILED not in events


async def test_an_app_that_raises_is_answered_once() -> None:
    server, client, events = await serve_app()
    async with client:
        response = await client.get("/fail")
        assert response.status_code == 500
        assert "broken" not in response.text
        assert (await client.get("/pieces")).status_code == 200
    await server.drain(1)
    assert events.count(HttpEvent.HANDLER_FAILED) == 1


async def test_an_answer_over_the_limit_is_a_failure() -> None:
    server, client, _ = await serve_app(answer_bytes_max=1000)
    async with client:
        assert (await client.get("/large")).status_code == 500
    await server.drain(1)


async def test_receive_after_the_answer_says_disconnect() -> None:
    reported: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        reported.append((await receive())["type"])
        await send({"type": "http.response.start", "status": 204, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})
        reported.append((await receive())["type"])

    server = HttpServer(AsgiBridge(app))
    await server.serve()
    host, port = server.addresses[0]
    async with httpx.AsyncClient(trust_env=False) as client, asyncio.timeout(60):
        response = await client.get(f"http://{host}:{port}/")
        assert response.status_code == 204
        assert "content-length" not in response.headers
    await server.drain(1)
    assert reported == ["http.request", "http.disconnect"]

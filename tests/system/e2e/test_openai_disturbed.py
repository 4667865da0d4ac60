"""Clients that leave or read slowly, and workers that die, through real HTTP."""

import asyncio
import json
import socket

import openai
import pytest

from kvrouter.settings.tree import FrontendSettings
from tests.testing.mock_fleet import BLOCK, LONG_TOKENS, uniform_fleet, zoned_fleet
from tests.testing.mock_server import MODEL, MockServer, mock_server, user, words
from tests.testing.waits import until

HANDOFFS = pytest.mark.parametrize("handoff", ["bootstrap", "synchronous"])
SLOW_TOKENS = 150_000
BODY = {"model": MODEL, "messages": user(words(n=64)), "temperature": 0, "max_tokens": LONG_TOKENS}


async def events_of(here: MockServer, kill_leg: str | None) -> list[dict[str, object]]:
    """Stream one chat; at its first piece of text, kill the worker of that leg."""
    events: list[dict[str, object]] = []
    body = {**BODY, "stream": True, "stream_options": {"include_usage": True}}
    async with here.http.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if not line or line == "data: [DONE]":
                continue
            events.append(json.loads(line.removeprefix("data: ")))
            if kill_leg is not None:
                await here.kill(response.headers[f"x-kvrouter-{kill_leg}-worker"])
                kill_leg = None
    return events


def deltas(events: list[dict[str, object]], field: str) -> list[str]:
    found: list[str] = []
    for event in events:
        choices = event["choices"]
        assert isinstance(choices, list)
        found += [choice["delta"][field] for choice in choices if choice["delta"].get(field)]
    return found


@HANDOFFS
async def test_a_worker_killed_in_mid_stream_costs_no_token(handoff: str) -> None:
    async with mock_server(zoned_fleet(handoff=handoff, speedup=40.0)) as here:
        whole = (await here.http.post("/v1/chat/completions", json=BODY)).json()
        events = await events_of(here, "decode")
        assert "".join(deltas(events, "content")) == whole["choices"][0]["message"]["content"]
        assert deltas(events, "role") == ["assistant"]
        assert events[-1]["usage"]["completion_tokens"] == LONG_TOKENS  # type: ignore[index]
        assert not any("error" in event for event in events)
        metrics = await here.metrics()
        assert metrics.value("resumes_total", model=MODEL) == 1
        assert metrics.value("completion_tokens_total", model=MODEL) == 2 * LONG_TOKENS
        assert metrics.value("requests_total", status="200") == 2


async def test_a_stream_whose_last_worker_dies_ends_with_one_error_event() -> None:
    async with mock_server(uniform_fleet(replicas=1, speedup=40.0)) as here:
        lines: list[str] = []
        body = {**BODY, "stream": True}
        async with here.http.stream("POST", "/v1/chat/completions", json=body) as response:
            async for line in response.aiter_lines():
                if not lines:
                    await here.kill(1)
                lines += [line] if line else []
        assert "data: [DONE]" not in lines
        errors = [line for line in lines if '"error"' in line]
        assert errors == lines[-1:]
        assert json.loads(errors[0].removeprefix("data: "))["error"]["code"] == "no_eligible_worker"


@HANDOFFS
async def test_a_client_that_disconnects_in_mid_stream_frees_both_engines(handoff: str) -> None:
    async with mock_server(zoned_fleet(handoff=handoff, speedup=1.0)) as here:
        stream = await here.openai.chat.completions.create(
            model=MODEL, messages=user(words(n=64)), max_tokens=2000, stream=True
        )
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                break
        assert not here.system.fleet.cluster.idle
        await stream.close()
        await here.until_quiet()
        metrics = await here.metrics()
        assert metrics.value("cancellations_total", model=MODEL, stage="decode") == 1
        assert metrics.value("ledger_active_blocks") == metrics.value("ledger_leases") == 0


async def test_clients_timing_out_before_the_first_token_free_both_engines() -> None:
    async with mock_server(zoned_fleet(speedup=0.002)) as here:
        impatient = here.openai.with_options(timeout=5.0)
        calls = (
            impatient.chat.completions.create(
                model=MODEL, messages=user(words(n=64)), max_tokens=5, stream=stream
            )
            for stream in (False, True)
        )
        ends = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(end) for end in ends] == 2 * [openai.APITimeoutError]
        await here.until_quiet()
        telemetry = here.system.telemetry
        assert telemetry.cancellations.value(MODEL, "prefill") == 2
        assert telemetry.requests.value("/v1/chat/completions", MODEL, "499") == 2


async def test_a_slow_reader_pauses_only_its_own_engine_stream() -> None:
    """It reads nothing at all: its engine pauses, and answers next to it are whole."""
    settings = FrontendSettings(write_high_water_bytes=8192, write_low_water_bytes=4096)
    async with mock_server(uniform_fleet(replicas=1), frontend=settings) as here:
        loop = asyncio.get_running_loop()
        with narrow_socket() as slow:
            listening = narrow_socket()
            listening.bind(("127.0.0.1", 0))
            await here.system.server.serve(sockets=[listening])
            body = json.dumps({**BODY, "stream": True, "max_tokens": SLOW_TOKENS}).encode()
            head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
            await loop.sock_connect(slow, listening.getsockname())
            await loop.sock_sendall(slow, head.encode() + body)
            await until(lambda: here.system.service.requests.running == 1)
            blocks, before = 0.0, -1.0
            while blocks != before or not blocks:
                completion = await here.openai.completions.create(
                    model=MODEL, prompt=words(first=3), max_tokens=700, temperature=0
                )
                assert completion.usage is not None
                assert completion.usage.completion_tokens == 700
                assert here.system.service.requests.running == 1
                before, blocks = blocks, (await here.metrics()).value("ledger_active_blocks")
            assert blocks < SLOW_TOKENS / BLOCK / 2, "its engine stands still, far from the end"
        await here.until_quiet()


def narrow_socket() -> socket.socket:
    """A socket whose buffers in the kernel hold next to nothing."""
    narrow = socket.socket()
    narrow.setblocking(False)
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        narrow.setsockopt(socket.SOL_SOCKET, option, 4096)
    return narrow

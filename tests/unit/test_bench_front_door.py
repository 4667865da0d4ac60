"""The harness of the front door's rows: backend, client, server process. No duration is judged here."""

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from benchmarks.frontend.backend import Backend
from benchmarks.frontend.client import AnswerFailed, ask_in_turn, prompt_of, stream_side_by_side
from benchmarks.frontend.processes import free_port, gateway, our_server

TICK_S = 0.001


@pytest.fixture
async def backend_port() -> AsyncIterator[int]:
    backend = Backend(TICK_S)
    yield await backend.serve()
    backend.close()


def test_prompts_depend_on_the_seed_alone() -> None:
    assert prompt_of(1, 50) == prompt_of(1, 50)
    assert prompt_of(1, 50) != prompt_of(2, 50)
    assert len(prompt_of(1, 50).split()) == 50


async def test_the_backend_streams_a_text_a_token(backend_port: int) -> None:
    assert await stream_side_by_side(backend_port, streams=3, tokens=5, seed=0) == 15


async def test_the_backend_answers_in_turn(backend_port: int) -> None:
    await ask_in_turn(backend_port, requests=3, prompt_words=10, seed=0)


async def test_our_server_streams_and_answers_and_its_cpu_is_seen() -> None:
    with our_server(Path(sys.executable), TICK_S) as server:
        before_us = server.cpu_us()
        assert server.engine_us > 0
        assert await stream_side_by_side(server.port, streams=3, tokens=5, seed=0) >= 15
        await ask_in_turn(server.port, requests=2, prompt_words=2000, seed=0)
        assert server.cpu_us() > before_us


async def test_an_answer_that_is_refused_is_no_figure(backend_port: int) -> None:
    with our_server(Path(sys.executable), TICK_S) as server:
        with pytest.raises(AnswerFailed, match="400"):
            await ask_in_turn(server.port, requests=1, prompt_words=140_000, seed=0)
        with pytest.raises(AnswerFailed, match="400"):
            await stream_side_by_side(server.port, streams=1, tokens=10**9, seed=0)


def test_a_gateway_that_does_not_start_says_so() -> None:
    with (
        pytest.raises(RuntimeError, match="ended with 3"),
        gateway("broken", [sys.executable, "-c", "raise SystemExit(3)"], free_port()),
    ):
        pass

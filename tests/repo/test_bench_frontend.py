"""The harness of the front door's rows: engines, client, server processes. No duration is judged here."""

import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.frontend.backend import Backend
from benchmarks.frontend.client import (
    AnswerFailed,
    ask_in_turn,
    first_tokens_us,
    prompt_of,
    stream_side_by_side,
    wait_ready,
)
from benchmarks.frontend.processes import Server, gateway, module, our_frontend
from tests.testing.processes import free_ports

TICK_S = 0.01


def clock_us() -> float:
    return time.process_time() * 1e6


@pytest.fixture
async def backend_port() -> AsyncIterator[int]:
    backend = Backend(TICK_S)
    yield await backend.serve()
    backend.close()


@pytest.fixture
def frontend(tmp_path: Path) -> Iterator[Server]:
    tmp_path.chmod(0o700)
    with ExitStack() as stack:
        stack.enter_context(module("benchmarks.frontend.worker", str(TICK_S), "1", str(tmp_path)))
        yield stack.enter_context(our_frontend(Path(sys.executable), tmp_path))


def test_prompts_depend_on_the_seed_alone() -> None:
    assert prompt_of(1, 50) == prompt_of(1, 50)
    assert prompt_of(1, 50) != prompt_of(2, 50)
    assert len(prompt_of(1, 50).split()) == 50


async def test_the_backend_streams_side_by_side_answers(backend_port: int) -> None:
    cost = await stream_side_by_side(
        backend_port, streams=3, tokens=60, tick_s=TICK_S, seed=0, cpu_us=clock_us
    )
    assert cost.whole_us > 0
    assert cost.middle_us > 0
    assert cost.tokens_per_event >= 1


async def test_the_backend_answers_sequential_requests(backend_port: int) -> None:
    await ask_in_turn(backend_port, requests=3, prompt_words=10, seed=0)
    assert len(await first_tokens_us(backend_port, requests=3, prompt_words=10, seed=0)) == 3


async def test_the_frontend_serves_other_processes_and_its_cpu_is_measured(frontend: Server) -> None:
    await wait_ready(frontend.port)
    clock = frontend.busy_clock()
    cost = await stream_side_by_side(
        frontend.port, streams=3, tokens=150, tick_s=TICK_S, seed=0, cpu_us=frontend.cpu_us
    )
    assert cost.whole_us > 0
    assert len(await first_tokens_us(frontend.port, requests=2, prompt_words=2000, seed=0)) == 2
    assert clock() > 0
    assert frontend.watch_idle(0.1) >= 0
    with pytest.raises(AnswerFailed, match="400"):
        await ask_in_turn(frontend.port, requests=1, prompt_words=140_000, seed=0)


async def test_an_upstream_of_its_own_process_answers() -> None:
    with module("benchmarks.frontend.upstream", str(TICK_S)) as port:
        await ask_in_turn(port, requests=1, prompt_words=10, seed=0)


def test_a_module_that_does_not_start_raises_an_error() -> None:
    with pytest.raises(RuntimeError, match="before it served"), module("benchmarks.frontend.client"):
        pass


def test_a_gateway_that_does_not_start_raises_an_error() -> None:
    with (
        pytest.raises(RuntimeError, match="ended with 3"),
        gateway("broken", [sys.executable, "-c", "raise SystemExit(3)"], free_ports(1)),
    ):
        pass

"""``kvrouter bench`` on two real vLLM: the router finds far more in their caches than round-robin."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from kvrouter.cli import main
from tests.system.engines.calls import attached, stopped, two_of
from tests.system.engines.vllm_server import VllmServer
from tests.testing.processes import Fleet

CONTEXT_TOKENS = 4096
"""As long as the tiny model has it: what is not cached must take longer than a request before it."""

N_BLOCKS = 800
"""Sixteen conversations fill nine tenths of two such caches."""

ENOUGH_S = "600"
"""So that the number of conversations does not depend on how busy the machine is."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(engine_folder: Path) -> AsyncIterator[dict[int, VllmServer]]:
    """Two engines."""
    async with stopped(two_of(VllmServer, engine_folder)) as both:
        await asyncio.gather(
            *(each.start(n_blocks=N_BLOCKS, context_length=CONTEXT_TOKENS) for each in both.values())
        )
        yield both


async def test_the_router_finds_thirty_points_more_than_round_robin(
    engines: dict[int, VllmServer], kvrouter: Fleet, capsys: pytest.CaptureFixture[str]
) -> None:
    frontend = await attached(kvrouter, engines)
    arguments = ["bench", "--url", frontend.url, "--seconds", ENOUGH_S, "--rounds", "1", "--output", "json"]
    assert await asyncio.to_thread(main, arguments) == 0
    found = json.loads(capsys.readouterr().out)
    ours, round_robin = found["arms"]
    assert (found["engines"], found["conversations"]) == (2, 16)
    assert (ours["errors"], round_robin["errors"]) == (0, 0)
    assert round_robin["via"] == "straight to 2 engines, in turn"
    for arm in (ours, round_robin):
        assert arm["counted"] == {
            "prompt_tokens": arm["prompt_tokens"],
            "cached_tokens": arm["cached_tokens"],
        }
    assert ours["hit_rate"] - round_robin["hit_rate"] >= 0.30, found

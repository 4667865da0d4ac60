"""The same calls to a real vLLM directly and through kvrouter, as bytes and by the packages of OpenAI and
Anthropic: nothing differs but what the page *Differences* says.
"""

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest_asyncio

from tests.system.differential.calls import CHAT, RESPONSES, Call, field_calls, odd_calls, plain_calls
from tests.system.differential.compare import Seen
from tests.system.differential.run import Tally
from tests.system.differential.wire import parsed, received
from tests.system.engines.calls import attached, stopped
from tests.system.engines.install import engines_dir
from tests.system.engines.real_engine import MODEL
from tests.system.engines.vllm_server import VllmServer
from tests.testing.processes import Fleet, Frontend

TRIES = 3
"""A busy engine may tell two tokens in one event. A call whose answers differ is made again: what kvrouter
does to it differs each time.
"""

SEVERAL = (["a", "b"], [[5, 6], [7]])
"""Several prompts."""

BY_TABLE = frozenset({"models", "unknown model"})
"""The calls of the packages whose answers differ by rows of the table."""

SDK_WITHIN_S = 240.0

_OF_ITS_OWN = (
    (re.compile(rb'"((?:\w+_)?id)":\s*"[^"]*"'), rb'"\1":"ID"'),
    (re.compile(rb'"(created|created_at|completed_at)":\s*[\d.]+'), rb'"\1":0'),
    (
        re.compile(
            rb'"(cached_tokens|created_cache_tokens|cache_read_input_tokens|cache_creation_input_tokens'
            rb'|cache_write_tokens|server_load)":\s*\d+'
        ),
        rb'"\1":0',
    ),
    (re.compile(rb'"cached_tokens_per_turn":\s*\[[^\]]*\]'), rb'"cached_tokens_per_turn":[]'),
)
"""What differs between any two answers: names, moments, what was cached, and how busy the engine is."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(engine_folder: Path) -> AsyncIterator[VllmServer]:
    """One engine."""
    async with stopped({1: VllmServer(engine_folder, "vllm", core=0)}) as one:
        await one[1].start(flags=("--enable-auto-tool-choice", "--tool-call-parser", "hermes"))
        yield one[1]


def real_calls() -> list[Call]:
    """Calls that a script changes nothing of: half of those with odd fields. Several answers are interleaved
    as they come, and without a limit an answer is as long as the context. What a slash behind a path gives is
    compared with the call without it, before the scripted engine, and so are lists of models and other types
    than JSON. An engine of a model that generates has no embeddings, whatever the method.
    """
    made = [*plain_calls(), *[*field_calls()][::2], *odd_calls()]
    made = [
        replace(call, body=call.body.replace(b'"temperature":"0.5"', b'"temperature":"0"')) for call in made
    ]
    return [call for call in made if not _is_left_out(call)]


def _is_left_out(call: Call) -> bool:
    fields = call.fields
    has_several = fields.get("n") not in (None, 1, 1.0) or fields.get("prompt") in SEVERAL
    limit = fields.get("max_tokens") or fields.get("max_completion_tokens") or fields.get("max_output_tokens")
    is_endless = call.path in (CHAT, f"{CHAT}/batch", RESPONSES) and not limit
    is_unknown = call.path in ("/v1/embeddings", "/ping") and "plain" not in call.name
    is_slashed = call.target.endswith("/")
    is_by_scripted = (
        call.path.startswith("/v1/models") or f"{CHAT}: as" in call.name or "no type" in call.name
    )
    return (
        is_slashed
        or is_by_scripted
        or is_endless
        or is_unknown
        or (has_several and bool(fields.get("stream")))
    )


async def test_answers_through_kvrouter_differ_only_as_the_table_lists(
    engine: VllmServer, kvrouter: Fleet
) -> None:
    frontend = await attached(kvrouter, {1: engine})
    tally = Tally()
    for call in real_calls():
        for attempt in range(TRIES):
            seen = [await _seen(way, call) for way in (engine, frontend)]
            one = Tally()
            one.add(call, *seen)
            if not _may_be_bundled(one) or attempt == TRIES - 1:
                tally.add(call, *seen)
                break
    print(f"\n{tally}")
    assert len(tally.same) > 100
    assert not tally.different


def _may_be_bundled(one: Tally) -> bool:
    """Whether nothing but the events of a stream differ."""
    found = [found for others in one.different.values() for found in others]
    return bool(found) and all(
        each.field == "body" and isinstance(each.alone, bytes) and b"data: " in each.alone for each in found
    )


async def _seen(way: VllmServer | Frontend, call: Call) -> Seen:
    host, _, port = way.url.removeprefix("http://").partition(":")
    answer = parsed(await received((host, int(port)), call), call.method)
    body = answer.body
    for pattern, replacement in _OF_ITS_OWN:
        body = pattern.sub(replacement, body)
    headers = tuple(
        (name, "0" if name == "x-kvrouter-overlap-blocks" else value) for name, value in answer.headers
    )
    return Seen(replace(answer, headers=headers, body=body), ())


async def test_openai_and_anthropic_packages_get_equal_results(engine: VllmServer, kvrouter: Fleet) -> None:
    frontend = await attached(kvrouter, {1: engine})
    different: set[str] = set()
    for attempt in range(TRIES):
        alone, through = [await _given(way.url) for way in (engine, frontend)]
        assert len(alone) > 50
        assert alone.keys() == through.keys()
        found = {name for name in alone if alone[name] != through[name]}
        assert found >= BY_TABLE
        found -= BY_TABLE
        different = found if attempt == 0 else different & found
        if not different:
            break
    shown = "\n".join(f"{name}\n  {alone[name][:900]}\n  {through[name][:900]}" for name in sorted(different))
    print(f"{len(alone)} calls, {len(different)} different\n{shown}")
    assert not different


async def _given(url: str) -> dict[str, str]:
    """What callers of the packages are given, by what they call."""
    python = engines_dir() / "venv" / "bin" / "python"
    process = await asyncio.create_subprocess_exec(
        *(str(python), str(Path(__file__).with_name("sdk_calls.py")), url, MODEL),
        stdout=asyncio.subprocess.PIPE,
        stderr=sys.stderr,
    )
    async with asyncio.timeout(SDK_WITHIN_S):
        out, _ = await process.communicate()
    assert process.returncode == 0
    for pattern, replacement in _OF_ITS_OWN:
        out = pattern.sub(replacement, out)
    return {name: json.dumps(given) for name, given in map(json.loads, out.splitlines())}

"""Every call of every client, before a mock fleet and before a real vLLM; and the page that says so.

``docs/clients.md`` is written by these tests, from what they saw.
"""

import json
import subprocess
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.system.clients.install import HERE, REQUIREMENTS, URL, commands
from tests.system.clients.install import MODEL as MODEL_PLACE
from tests.system.engines.calls import attached, stopped
from tests.system.engines.real_engine import MODEL
from tests.system.engines.vllm_server import VllmServer
from tests.testing.processes import Fleet, fleet

pytestmark = pytest.mark.asyncio(loop_scope="module")

PAGE = Path(__file__).parents[3] / "docs" / "clients.md"
CALL_S = 900.0

REFUSED = "get tokens, and no calls as they are written"
"""What a mock fleet answers on routes that pass to engines."""

NOT_BEFORE_MOCKS = frozenset(
    {
        ("openai (Python)", "responses"),
        ("openai (Python)", "responses, streamed"),
        ("openai (npm)", "responses"),
        ("anthropic (Python)", "messages"),
        ("anthropic (Python)", "messages, streamed"),
        ("anthropic (Python)", "count_tokens"),
        ("anthropic (npm)", "messages"),
        ("anthropic (npm)", "messages, streamed"),
        ("LiteLLM", "responses"),
        ("LiteLLM's proxy", "responses"),
        ("LangChain", "ChatAnthropic"),
        ("Vercel AI SDK", "openai(), its default: responses"),
        ("Vercel AI SDK", "openai(), streamed"),
        ("Vercel AI SDK", "anthropic()"),
    }
)

HEAD = """# Clients

<!-- Written by `make test-clients`: change the tests, not this page. -->

Each call was made as the client's users write it, with nothing set but the address, a key and the model:
before a fleet of mock engines, and before a vLLM server on CPU that is attached to kvrouter. Mock engines get
tokens, so they serve chats and completions alone; routes that
[pass to engines](http-api.md#further-routes-of-engines) answer `route_not_served` there.

LiteLLM's proxy ran as a process with a model of kvrouter in its configuration, called by OpenAI's
package; a 404 and a 400 of kvrouter came through it as such. Its configuration has `disable_cooldowns:
true` in `router_settings`: else the proxy takes a 404 for a broken deployment, and answers 429 to all
calls of that model for some seconds. aiperf and inference-perf ran eight requests each. They count tokens
themselves, so they were given a folder with a tokenizer (`--tokenizer`, `pretrained_model_name_or_path`),
which needs no hub. aiperf must not run with `HF_HUB_OFFLINE=1`: then it takes a folder for the name of a
repository, and ends. inference-perf needs Python 3.12 or later.

| client | call | mock engines | vLLM |
|---|---|---|---|
"""

Results = dict[tuple[str, str], str | None]
"""Why a call failed, or None, by client and call."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def processes() -> AsyncIterator[Fleet]:
    async with fleet() as kvrouter:
        yield kvrouter


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def seen(
    processes: Fleet, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Mapping[str, Results]]:
    """What became of each call, by what was behind the router."""
    async with stopped({1: VllmServer(tmp_path_factory.mktemp("engines"), "vllm", core=0)}) as engines:
        await engines[1].start(flags=("--enable-auto-tool-choice", "--tool-call-parser", "hermes"))
        vllm = await attached(processes, engines)
        mock = await processes.door("up")
        yield {"mock": results(mock.url, "mock"), "vllm": results(vllm.url, MODEL)}


def results(url: str, model: str) -> Results:
    found: Results = {}
    for command in commands().values():
        placed = {URL: url, MODEL_PLACE: model}
        called = [placed.get(each, each) for each in command]
        done = subprocess.run(called, capture_output=True, text=True, timeout=CALL_S, check=False)
        assert done.returncode == 0, done.stderr
        for line in done.stdout.splitlines():
            if line.startswith("{"):
                said: dict[str, Any] = json.loads(line)
                found[said["client"], said["what"]] = said["failed"]
    return found


async def test_every_client_call_succeeds_or_is_a_known_refusal(seen: Mapping[str, Results]) -> None:
    assert seen["mock"].keys() == seen["vllm"].keys() >= NOT_BEFORE_MOCKS
    for behind, calls in seen.items():
        for call, failed in calls.items():
            if behind == "mock" and call in NOT_BEFORE_MOCKS:
                assert failed is not None, call
                assert REFUSED in failed, f"{call}: {failed}"
            else:
                assert failed is None, f"{behind}: {call}: {failed}"


async def test_the_clients_page_is_written_from_the_results(seen: Mapping[str, Results]) -> None:
    rows = [
        f"| {client} | {what} | {_word(seen['mock'][client, what])} | {_word(seen['vllm'][client, what])} |\n"
        for client, what in seen["vllm"]
    ]
    PAGE.write_text(HEAD + "".join(rows) + f"\n{_versions()}", encoding="utf-8")


def _word(failed: str | None) -> str:
    return "works" if failed is None else "no"


def _versions() -> str:
    python = [line for file in REQUIREMENTS for line in (HERE / file).read_text("utf-8").split()]
    npm: dict[str, str] = json.loads((HERE / "package.json").read_text("utf-8"))["dependencies"]
    named = [
        *(each.replace("==", " ") for each in python),
        *(f"{name} {at} (npm)" for name, at in npm.items()),
    ]
    older = "The proxy is older than the SDK: parts that 1.108.14, 1.109.3 and 1.110.2 of it ask for were "
    return f"With {', '.join(named)}. {older}not in the package index.\n"

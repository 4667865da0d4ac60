"""``kvrouter bench`` as its user types it: on engines with an HTTP server, and on mock fleets."""

import asyncio
import json
import shutil
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvrouter.cli import main
from kvrouter.cli.up.run import embedded
from kvrouter.core.errors import INTERRUPTED
from kvrouter.core.requests import EngineChunk
from kvrouter.core.timing import Timing
from kvrouter.engines.mock_engine.config import MockConfig
from kvrouter.fleetfile.fleet_checks import load_fleet
from kvrouter.fleetfile.fleet_file import FleetFile
from kvrouter.settings.problems import parse_document
from kvrouter.settings.tree import FrontendSettings, Settings
from kvrouter.text.model import FIRST_WORD_ID, mock_words
from kvrouter.text.source import MOCK_FOLDER
from tests.testing.doctor import UNTIMED
from tests.testing.engine_requests import MODEL
from tests.testing.mock_fleet import uniform_fleet, zoned_fleet
from tests.testing.mock_server import mock_server
from tests.testing.processes import default_signals
from tests.testing.small_engine import ParsedCall, SmallEngine, small_engine
from tests.testing.small_engine_protocols import VllmAnswer, VllmProtocol

WORD_IDS = {word: FIRST_WORD_ID + at for at, word in enumerate(mock_words())}
TIMING = Timing(
    prefill_quadratic=0.0,
    prefill_linear=0.05,
    prefill_base=1.0,
    decode_quadratic=0.0,
    decode_linear=0.0,
    decode_base=1.0,
)
ENGINE = MockConfig(block_size=16, total_kv_blocks=4096, timing=TIMING)
"""One cache has room for all conversations of ten seconds: nothing depends on how even they are spread."""

ONE_AT_A_TIME = ("--concurrency", "1")
"""Prompts have the length that the machine affords: a slow one gets shorter ones instead of a refusal."""


class TextVllm(VllmProtocol):
    """A vLLM that takes text too, and counts the prompt tokens that it had cached as vLLM does."""

    def __init__(self, *, says_cached: bool = True) -> None:
        super().__init__(context_tokens=2_048)
        self.says_cached = says_cached
        self.queries = self.hits = 0

    def page(self, path: str, engine: SmallEngine) -> bytes | None:
        page = super().page(path, engine)
        if path != "/metrics" or page is None:
            return page
        counters = {"queries": self.queries, "hits": self.hits}
        lines = [f"vllm:prefix_cache_{name}_total {count}\n" for name, count in counters.items()]
        return page + "".join(lines).encode()

    def asked(self, path: str, headers: Mapping[str, str], body: bytes, config: MockConfig) -> ParsedCall:
        said = json.loads(body)
        if isinstance(said["prompt"], str):
            said["prompt"] = [WORD_IDS[word] for word in said["prompt"].split()]
        call = super().asked(path, headers, json.dumps(said).encode(), config)
        return call._replace(answering=CountedAnswer(said, len(said["prompt"]), self))


class CountedAnswer(VllmAnswer):
    """An answer whose cached tokens its engine counts."""

    def __init__(self, said: Mapping[str, object], n_prompt: int, engine: TextVllm) -> None:
        super().__init__(said, n_prompt)
        self._engine = engine

    def _count(self, chunk: EngineChunk) -> None:
        super()._count(chunk)
        if chunk.finish is not None:
            self._engine.queries += self._n_prompt
            self._engine.hits += self._cached or 0

    def _usage(self) -> dict[str, object]:
        usage = super()._usage()
        return usage if self._engine.says_cached else {**usage, "prompt_tokens_details": None}


@asynccontextmanager
async def router_before(folder: Path, *protocols: TextVllm) -> AsyncIterator[str]:
    """The URL of ``kvrouter up`` before an engine of each protocol."""
    tokenizer = shutil.copytree(MOCK_FOLDER, folder / "tokenizer")
    async with small_engine(protocols[0], ENGINE) as first, small_engine(protocols[-1], ENGINE) as second:
        urls = ", ".join(f"'{engine.url}'" for engine in (first, second)[: len(protocols)])
        text = (
            f"version: 1\nmodels: [{{name: {MODEL}, tokenizer: {tokenizer}}}]\n"
            f"workers: [{{name: w, engine: {{kind: vllm, urls: [{urls}]}}}}]\n"
        )
        fleet = load_fleet(parse_document(text, "fleet.yaml")).fleet
        settings = Settings(frontend=FrontendSettings(http_port=0), router=UNTIMED)
        async with embedded(settings, fleet, environ={}) as system:
            host, port = system.address
            yield f"http://{host}:{port}"


async def bench(url: str, *flags: str) -> int:
    """Run the command for one round."""
    return await asyncio.to_thread(main, ["bench", "--url", url, "--seconds", "10", "--rounds", "1", *flags])


async def report_of(capsys: pytest.CaptureFixture[str], url: str, *flags: str) -> dict[str, Any]:
    assert await bench(url, "--output", "json", *flags) == 0
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


async def test_the_router_finds_more_than_round_robin_and_as_much_as_the_engines_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    protocols = TextVllm(), TextVllm()
    async with router_before(tmp_path, *protocols) as url:
        found = await report_of(capsys, url, *ONE_AT_A_TIME)
    ours, round_robin = found["arms"]
    assert (ours["errors"], round_robin["errors"]) == (0, 0)
    assert ours["requests"] == round_robin["requests"] == found["rounds"] * found["conversations"] * 4
    assert ours["hit_rate"] > round_robin["hit_rate"] + 0.1
    assert round_robin["via"] == "straight to 2 engines, in turn"
    for arm in (ours, round_robin):
        assert arm["counted"] == {
            "prompt_tokens": arm["prompt_tokens"],
            "cached_tokens": arm["cached_tokens"],
        }
    assert not [note for note in found["notes"] if "others used" in note]


async def test_engines_that_answer_without_cached_tokens_are_read_by_their_counters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with router_before(tmp_path, TextVllm(says_cached=False)) as url:
        found = await report_of(capsys, url, *ONE_AT_A_TIME)
    ours, round_robin = found["arms"]
    assert ours["hit_rate"] == round_robin["hit_rate"] > 0.5
    assert ours["cached_tokens"] == ours["counted"]["cached_tokens"]
    assert any(note.startswith("one KV cache: ") for note in found["notes"])


@pytest.mark.parametrize(
    ("fleet", "why"),
    [
        (uniform_fleet(replicas=2), "mock engines have none"),
        (zoned_fleet(), "prefill and decode are separate"),
    ],
    ids=["mock", "pairs"],
)
async def test_mock_fleets_are_compared_with_the_routers_own_round_robin(
    fleet: FleetFile, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with mock_server(fleet, router=UNTIMED) as here:
        assert await bench(here.url, "--output", "json", *ONE_AT_A_TIME) == 0
    shown, said = capsys.readouterr()
    ours, round_robin = json.loads(shown)["arms"]
    assert why in round_robin["via"]
    assert ours["hit_rate"] > round_robin["hit_rate"] > 0.0
    assert ours["counted"]["prompt_tokens"] == ours["prompt_tokens"], "by the router's page of metrics"
    assert "each round sends " in said
    assert "round 1, round-robin: " in said


async def test_ctrl_c_leaves_a_report_of_the_rounds_that_are_over() -> None:
    small_caches = uniform_fleet(replicas=2, engine="{total_kv_blocks: 64}")  # a round has few conversations
    async with mock_server(small_caches, router=UNTIMED) as here:
        flags = ("--url", here.url, "--seconds", "600", "--output", "json", "--prompt-tokens", "96")
        bench = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kvrouter.cli", "bench", *flags),
            stdout=PIPE,
            stderr=PIPE,
            preexec_fn=default_signals,
        )
        assert bench.stderr is not None
        async with asyncio.timeout(300.0):
            while not (await bench.stderr.readline()).startswith(b"round 2, "):
                assert not bench.stderr.at_eof()
            bench.send_signal(signal.SIGINT)
            shown, _ = await bench.communicate()
    found = json.loads(shown)
    assert bench.returncode == INTERRUPTED
    assert any(note.startswith("interrupted: ") for note in found["notes"])
    assert found["rounds"] >= 1
    assert found["arms"][0]["requests"] == found["rounds"] * found["conversations"] * 4


async def test_mistakes_name_their_flag(capsys: pytest.CaptureFixture[str]) -> None:
    async with mock_server(uniform_fleet(replicas=2)) as here:
        url = here.url
        for flags, message in (
            (("--peer", "x"), "--peer: must be NAME=URL, not 'x'"),
            (("--peer", "kvrouter=http://127.0.0.1:1"), "--peer: 'kvrouter' is another arm's name already"),
            (("--peer", "x=ftp://a"), "--peer: ftp://a: must be http://HOST:PORT"),
            (("--engine-url", "http://127.0.0.1:1"), "--engine-url: 1 given, and the router has 2 engines"),
            (("--engine-url", url), f"--engine-url: {url}: is the router itself"),
            (("--engine-url", "nowhere"), "--engine-url: nowhere: must be http://HOST:PORT"),
            (("--model", "other"), f"--model: {here.url} serves mock, not 'other'"),
            (("--prompt-tokens", "1000000"), "--prompt-tokens: must be at most "),
        ):
            assert await bench(here.url, *flags) == 2
            assert message in capsys.readouterr().err
        engines = (f"--engine-url=http://127.0.0.1:{port}" for port in (1, 2))
        assert await bench(here.url, *engines) == 1
        assert "--engine-url: round-robin: http://127.0.0.1:1/v1/completions: " in capsys.readouterr().err
        assert await bench(here.url, "--peer", "x=http://127.0.0.1:1") == 1
        assert "--peer: x: http://127.0.0.1:1/v1/completions: " in capsys.readouterr().err
    assert await bench(url) == 1
    assert f"{url}: no answer" in capsys.readouterr().err

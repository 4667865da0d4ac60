"""Engines that run already, in a program without worker processes: attached by URL, or of a fleet file."""

import asyncio
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from kvrouter import KvRouter, ModelRuntimeConfig, Runtime, mock_fleet
from kvrouter.app.attach import attachment
from kvrouter.core.errors import (
    ConfigError,
    InvalidRequest,
    KvrouterError,
    NoEligibleWorker,
    Reason,
    ShuttingDown,
)
from kvrouter.core.ids import Taint
from kvrouter.core.workers import Role
from kvrouter.engines.mock import MockCluster
from kvrouter.library import Endpoint
from kvrouter.settings.planes import PlaneSettings
from kvrouter.settings.router_settings import KvRouterConfig
from kvrouter.settings.tree import Settings
from tests.testing.attached_engines import BLOCK_SIZE, CONTEXT_TOKENS, config
from tests.testing.constants import SetConstants
from tests.testing.embedding_program import tokens_of
from tests.testing.log_events import event_of
from tests.testing.processes import eventually
from tests.testing.scripted_engine import VLLM_PAGES, scripted_engine
from tests.testing.small_engine import EngineProtocol, SmallEngine, small_engine
from tests.testing.small_engine_protocols import SglangProtocol, TrtllmProtocol, VllmProtocol
from tests.testing.waits import LIMIT_S, until

PROMPT = list(range(256, 256 + 4 * BLOCK_SIZE + 5))
LONG: Mapping[str, object] = {"max_tokens": 400, "ignore_eos": True}
NOWHERE = "http://127.0.0.1:9"
"""A URL where nothing listens."""


@pytest.fixture(autouse=True)
def _asked_at_once(set_constants: SetConstants) -> None:
    set_constants(attachment, PROBE_EVERY_S=0.01, RETRY_AFTER_S=0.01)


def vllm(
    role: Role = Role.BOTH, *, block_size: int = BLOCK_SIZE, cluster: MockCluster | None = None
) -> AbstractAsyncContextManager[SmallEngine]:
    return small_engine(VllmProtocol(CONTEXT_TOKENS), replace(config(role), block_size=block_size), cluster)


def endpoint_of(runtime: Runtime) -> Endpoint:
    return runtime.namespace("default").component("backend").endpoint("generate")


@asynccontextmanager
async def nothing_left() -> AsyncIterator[None]:
    """Every task that begins inside has ended at the end."""
    before = asyncio.all_tasks()
    yield
    await until(lambda: asyncio.all_tasks() <= before)


async def test_a_router_picks_among_attached_engines_and_streams_from_them() -> None:
    async with vllm() as a, vllm() as b, nothing_left(), Runtime.in_process() as runtime:
        cards = [await runtime.attach("vllm", url) for url in (a.url, f"{b.url}/")]
        assert [(card.worker_id, card.engine_url, card.block_size) for card in cards] == [
            (1, a.url, BLOCK_SIZE),
            (2, b.url, BLOCK_SIZE),
        ]
        async with KvRouter(endpoint_of(runtime)) as router:
            answer = await router.generate(PROMPT, worker_id=2, stop_conditions={"max_tokens": 6})
            pieces = [piece async for piece in answer]
            assert sum(len(piece["token_ids"]) for piece in pieces) == 6
            assert pieces[-1]["finish_reason"] == "length"

            async def is_stored() -> bool:  # by the engine's own events
                return (await router.dump_events()).count("block_hash") == 4

            await eventually(is_stored)
            assert await router.best_worker(PROMPT) == (2, 0, 4)
        assert runtime.why_absent() == []


@pytest.mark.parametrize(
    ("kind", "protocol"),
    [("sglang", SglangProtocol(CONTEXT_TOKENS)), ("trtllm", TrtllmProtocol(CONTEXT_TOKENS))],
)
async def test_engines_of_other_kinds_are_attached_too(kind: str, protocol: EngineProtocol) -> None:
    async with small_engine(protocol, config()) as engine, nothing_left(), Runtime.in_process() as runtime:
        assert (await runtime.attach(kind, engine.url)).block_size == BLOCK_SIZE
        async with KvRouter(endpoint_of(runtime)) as router:
            answer = await router.generate(PROMPT, stop_conditions={"max_tokens": 3})
            assert len(await tokens_of(answer)) == 3


async def test_attached_prefill_and_decode_engines_are_a_pair() -> None:
    cluster = MockCluster()
    async with (
        vllm(Role.PREFILL, cluster=cluster) as prefill,
        vllm(Role.DECODE, cluster=cluster) as decode,
        nothing_left(),
        Runtime.in_process() as runtime,
    ):
        zone = ModelRuntimeConfig(topology_domains={"zone": "a"}, taints=frozenset({Taint("gpu")}))
        for engine, role in ((prefill, "prefill"), (decode, "decode")):
            card = await runtime.attach("vllm", engine.url, role=role, runtime_config=zone, kv_events=False)
            assert (card.role, card.publishes_kv_events) == (role, False)
            assert card.runtime_config.topology_domains == {"zone": "a"}
            assert Taint("gpu") in card.runtime_config.taints
        async with KvRouter(endpoint_of(runtime), BLOCK_SIZE) as router:
            pair = await router.best_workers(PROMPT)
            assert [pair.prefill, pair.decode] == [(1, 0, 0), (2, 0, 0)]
            answer = await router.generate(PROMPT, stop_conditions={"max_tokens": 5})
            assert len(await tokens_of(answer)) == 5


INVALID: list[tuple[dict[str, object], str, str]] = [
    ({"kind": "vlm"}, "kind", "must be one of vllm, sglang, trtllm, not 'vlm'"),
    ({"kind": "mock"}, "kind", "must be one of vllm, sglang, trtllm, not 'mock'"),
    ({"url": "127.0.0.1:8000"}, "url", "must be http://HOST:PORT, or https, not '127.0.0.1:8000'"),
    ({"url": "http://127.0.0.1:8000/v1"}, "url", "must be the server's own URL, without /v1"),
    ({"role": "both!"}, "role", "must be 'prefill', 'decode' or 'both', not 'both!'"),
    ({"block_size": 0}, "block_size", "must be ≥ 1, not 0"),
    ({"dp_size": 2}, "dp_size", "the engine has 1 data-parallel ranks, not 2: leave it out"),
    ({"block_size": 16}, "block_size", "the engine's blocks have 32 tokens, not 16"),
    ({"context_length": 10_000}, "context_length", "the engine's context holds 700 tokens, not 10000"),
    ({"model": "large"}, "model", "the engine serves tiny, not 'large'"),
    ({"kv_events_endpoint": "here"}, "kv_events_endpoint", "must be tcp://HOST:PORT, not 'here'"),
    ({"kv_events_replay_endpoint": "tcp://a:1"}, "kv_events_replay_endpoint", "only together with kv_events"),
    ({"api_key": "a\nb"}, "api_key", "holds a line break or another control character"),
    ({"wait_s": math.nan}, "wait_s", "must be ≥ 0, not nan"),
    ({"url": NOWHERE}, "url", f"no engine answered: {NOWHERE}/v1/models: connection refused"),
    ({"url": NOWHERE, "wait_s": 0.02}, "url", f"no engine answered within 0.02 s: {NOWHERE}/v1/models: "),
]


@pytest.mark.parametrize(("arguments", "param", "must"), INVALID)
async def test_an_argument_that_is_invalid_or_contradicted_is_named(
    arguments: dict[str, object], param: str, must: str
) -> None:
    async with vllm() as engine, nothing_left(), Runtime.in_process() as runtime:
        attach: Any = runtime.attach
        with pytest.raises(ConfigError) as refused:
            await attach(**{"kind": "vllm", "url": engine.url, **arguments})
        assert refused.value.message.startswith(f"{param}: {must}")
        assert refused.value.param == param
        assert runtime.expected() == []
        assert (await runtime.attach("vllm", engine.url)).block_size == BLOCK_SIZE


async def test_engines_of_one_model_with_other_blocks_are_refused_by_block_size() -> None:
    async with vllm() as a, vllm(block_size=16) as b, nothing_left(), Runtime.in_process() as runtime:
        await runtime.attach("vllm", a.url)
        with pytest.raises(ConfigError) as refused:
            await runtime.attach("vllm", b.url)
        assert refused.value.param == "block_size"
        assert refused.value.message == (
            f"block_size: the engine's blocks have 16 tokens, and those of {a.url} have 32: "
            "engines of one model have blocks of one size"
        )
        for same in (a.url, f"{a.url}/", a.url.upper()):
            with pytest.raises(ConfigError, match="is attached already, by worker 1"):
                await runtime.attach("vllm", same)
        async with KvRouter(endpoint_of(runtime), block_size=16) as router:
            with pytest.raises(NoEligibleWorker, match="block_size: must be 16, as this router's, not 32"):
                await router.best_worker(PROMPT)


async def test_an_engine_that_starts_later_is_waited_for() -> None:
    async with vllm() as engine, nothing_left(), Runtime.in_process() as runtime:
        await engine.close_door()
        attaching = asyncio.create_task(runtime.attach("vllm", engine.url, wait_s=60.0))
        await until(lambda: any("connection refused" in line for line in runtime.why_absent()))
        async with KvRouter(endpoint_of(runtime)) as router:
            with pytest.raises(NoEligibleWorker, match=f"the engine at {engine.url} is awaited: .*refused"):
                await router.best_worker(PROMPT)
            await engine.open_door()
            card = await attaching
            assert (await router.best_worker(PROMPT)).worker_id == card.worker_id


@pytest.mark.parametrize("is_cancelled", [True, False])
async def test_a_wait_that_is_cancelled_or_outlives_its_runtime_leaves_nothing(is_cancelled: bool) -> None:
    async with nothing_left():
        async with Runtime.in_process() as runtime:
            attaching = asyncio.create_task(runtime.attach("vllm", NOWHERE, wait_s=math.inf))
            await until(lambda: any("refused" in line for line in runtime.why_absent()))
            if is_cancelled:
                attaching.cancel()
        with pytest.raises(asyncio.CancelledError if is_cancelled else ShuttingDown):
            await asyncio.wait_for(attaching, LIMIT_S)
        with pytest.raises(ShuttingDown, match="this runtime was closed"):
            await runtime.attach("vllm", NOWHERE)


async def test_a_detached_engine_ends_its_requests_and_gets_no_new_ones() -> None:
    async with vllm() as a, vllm() as b, nothing_left(), Runtime.in_process() as runtime:
        for url in (a.url, b.url):
            await runtime.attach("vllm", url)
        async with KvRouter(endpoint_of(runtime)) as router:
            answer = await router.generate(PROMPT, worker_id=1, stop_conditions=LONG)
            first = await anext(answer)
            detaching = asyncio.create_task(runtime.detach(1))
            rest = await tokens_of(answer)
            assert len(first["token_ids"]) + len(rest) == 400
            await detaching
            assert (await router.best_worker(PROMPT)).worker_id == 2
            with pytest.raises(InvalidRequest, match="worker_id: 1 was not attached here"):
                await runtime.detach(1)
            assert (await runtime.attach("vllm", a.url)).worker_id == 3


async def test_an_engine_that_drains_is_ended_with_its_runtime() -> None:
    async with vllm() as engine, nothing_left():
        async with Runtime.in_process() as runtime:
            await runtime.attach("vllm", engine.url)
            async with KvRouter(endpoint_of(runtime)) as router:
                answer = await router.generate(PROMPT, stop_conditions=LONG)
                await anext(answer)
                detaching = asyncio.create_task(runtime.detach(1, drain_limit_s=600.0))
                client = await endpoint_of(runtime).client()
                await until(lambda: client.instance_ids() == [])
                client.close()
                assert runtime.engines is not None
                await runtime.engines.close()
                with pytest.raises(KvrouterError):
                    await tokens_of(answer)
        await asyncio.wait_for(detaching, LIMIT_S)


@pytest.mark.parametrize("given", ["mine", "mine\n", None])
async def test_an_engine_gets_the_key_that_was_given_or_that_of_all_engines(
    given: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVROUTER_ENGINE_API_KEY", "all")
    async with scripted_engine(VLLM_PAGES) as engine, nothing_left(), Runtime.in_process() as runtime:
        await runtime.attach("vllm", engine.url, api_key=given, kv_events=False)
        keys = {headers["Authorization"] for headers in engine.question_headers}
        assert keys == {f"Bearer {(given or 'all').strip()}"}


async def test_a_runtime_in_the_program_routes_without_other_routers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings = Settings(router=KvRouterConfig(replica_sync=True))
    async with vllm() as engine, nothing_left(), Runtime.in_process(settings) as runtime:
        await runtime.attach("vllm", engine.url)
        async with KvRouter(endpoint_of(runtime)) as router:
            assert (await router.best_worker(PROMPT)).worker_id == 1
    assert caplog.text.count("router.replica_sync has no effect here") == 1
    elsewhere = Settings(planes=PlaneSettings(other_clusters="b=http://b:1"))
    with pytest.raises(ConfigError, match="discovers no workers"):
        async with Runtime.in_process(elsewhere):
            pass


async def test_runtimes_without_engines_of_their_own_attach_none() -> None:
    async with mock_fleet() as runtime:
        with pytest.raises(ConfigError, match=r"use Runtime.in_process\(\) or Runtime.from_fleet\(path\)"):
            await runtime.attach("vllm", NOWHERE)
        with pytest.raises(ConfigError, match="this runtime attaches no engines"):
            await runtime.detach(1)
        assert runtime.expected() == []


# The fleet file


def fleet_of(folder: Path, *engines: str, more: str = "") -> str:
    file = folder / "fleet.yaml"
    lines = "".join(f"  - {{name: w{at}, engine: {engine}}}\n" for at, engine in enumerate(engines))
    file.write_text(f"version: 1\nmodels: [{{name: tiny}}]\nworkers:\n{lines}{more}")
    return str(file)


def line_of(url: str) -> str:
    return f"{{kind: vllm, url: '{url}'}}"


async def test_a_fleet_files_engines_join_are_awaited_and_others_are_attached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYN_ROUTER_TEMPERATURE", "0.25")
    links = "{within: {zone: {latency_s: 0.001, bandwidth_bytes_per_s: 1.0e+9}}}"
    more = "router: {router_temperature: 0.5, overlap_score_weight: 2.0}\n"
    more += f"topology: {{levels: [zone], links: {links}}}\n"
    async with vllm() as a, vllm() as b, vllm() as c, nothing_left():
        await b.close_door()
        file = fleet_of(tmp_path, line_of(a.url), line_of(b.url), more=more)
        async with Runtime.from_fleet(file) as runtime:
            weights = runtime.router_config
            assert (weights.router_temperature, weights.overlap_score_weight) == (0.25, 2.0)
            assert runtime.links is not None
            assert list(runtime.links.by_level) == ["zone"]
            async with KvRouter(endpoint_of(runtime)) as router:
                assert (await router.best_worker(PROMPT)).worker_id == 1
                with pytest.raises(NoEligibleWorker) as refused:
                    await anext(await router.generate(PROMPT, worker_id=2))
                assert refused.value.refusals == {Reason.PINNED_ELSEWHERE: 1}
                where = f"the engine of workers[1].engine.url at {b.url} is awaited: "
                assert f"; {where}" in refused.value.message
                await b.open_door()
                await until(lambda: runtime.why_absent() == [])
                assert len(await tokens_of(await router.generate(PROMPT, worker_id=2))) == 16
                assert (await runtime.attach("vllm", c.url)).worker_id == 3
                assert {load["worker_id"] for load in await router.get_potential_loads(PROMPT)} == {1, 2, 3}


async def test_a_client_of_a_fleet_that_is_all_awaited_is_told_of_each_engine(tmp_path: Path) -> None:
    async with nothing_left(), Runtime.from_fleet(fleet_of(tmp_path, line_of(NOWHERE))) as runtime:
        client = await endpoint_of(runtime).client()
        with pytest.raises(NoEligibleWorker, match=f"no worker serves this endpoint; .*{NOWHERE} is awaited"):
            await client.generate({"token_ids": PROMPT})
        client.close()


async def test_an_engine_that_contradicts_the_fleet_file_is_refused_with_the_reason(tmp_path: Path) -> None:
    async with vllm() as a, vllm(block_size=16) as b, nothing_left():
        with pytest.raises(ConfigError) as refused:
            async with Runtime.from_fleet(fleet_of(tmp_path, line_of(a.url), line_of(b.url))):
                raise AssertionError("it began")
        assert f"workers[1].engine.url: {b.url}: models[0].block_size: the engine's" in refused.value.message


async def test_mock_engines_of_a_fleet_file_serve_in_its_namespace_and_warnings_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    more = "planes: {namespace: mine}\nrouter: {replica_sync: true}\n"
    file = fleet_of(tmp_path, "{kind: mock, kv_events: false}", more=more)
    async with nothing_left(), Runtime.from_fleet(Path(file)) as runtime:
        endpoint = runtime.namespace("mine").component("backend").endpoint("generate")
        async with KvRouter(endpoint) as router:
            assert len(await tokens_of(await router.generate(PROMPT))) == 16
    warned = [record.getMessage() for record in caplog.records if event_of(record) == "config_warning"]
    for said in ("publishes no KV events", "router.replica_sync has no effect here"):
        assert sum(said in line for line in warned) == 1


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "version: 1\nmodels: [{name: m}]\nworkers: [{name: w, engine: {kind: vlm}}]\n",
            "fleet.yaml:3: workers",
        ),
        ("version: 1\nmodels: [{name: m}]\nworkers: [{name: w, role: both, x: 1}]\n", "unknown key"),
    ],
)
async def test_a_mistake_in_the_fleet_file_has_its_line(text: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "fleet.yaml").write_text(text)
    for path in (tmp_path / "fleet.yaml", str(tmp_path / "fleet.yaml")):
        with pytest.raises(ConfigError, match=why):
            async with Runtime.from_fleet(path):
                raise AssertionError("it began")
    with pytest.raises(ConfigError, match="cannot be read"):
        async with Runtime.from_fleet("no such file"):
            raise AssertionError("it began")

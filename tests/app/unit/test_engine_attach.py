"""Attaching an engine that runs already: what it says of itself against what its operator says of it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from kvrouter.app.attach import attachment as attached_module
from kvrouter.app.attach.attachment import NotAnswered, attach, probe
from kvrouter.app.attach.spec import engine_card
from kvrouter.core.errors import ConfigError
from kvrouter.core.ids import DpRank, Epoch, WorkerId
from kvrouter.core.workers import (
    EventSource,
    EventTransport,
    KvFormat,
    ModelRuntimeConfig,
    ModelType,
    Role,
    WorkerCard,
)
from kvrouter.engines.attach import Attached, AttachSpec, events_of
from kvrouter.engines.kv_events.listener import EventsAt
from tests.testing.constants import SetConstants
from tests.testing.scripted_engine import SGLANG_PAGES, VLLM_PAGES, ScriptedEngine, scripted_engine
from tests.testing.trtllm_server import TRTLLM_PAGES
from tests.testing.waits import until

W = WorkerId(7)
HERE = "host.example"
"""Under which others reach the worker's host: the engine's own loopback would lead them astray."""
PAGES = {
    "vllm": VLLM_PAGES,
    "sglang": SGLANG_PAGES,
    "trtllm": TRTLLM_PAGES,
}
KINDS = pytest.mark.parametrize("kind", list(PAGES))
PUBLISHING_KINDS = pytest.mark.parametrize("kind", ["vllm", "sglang"])


@asynccontextmanager
async def attaching(scripted: ScriptedEngine, at: AttachSpec) -> AsyncIterator[Attached]:
    async with asyncio.timeout(60):
        attached = await attach(replace(at, url=at.url or scripted.url))
    try:
        yield attached
    finally:
        await attached.engine.stop()


def at(kind: str, **said: Any) -> AttachSpec:
    return AttachSpec(kind=kind, url="", worker_id=W, **{"wait_s": 600.0, **said})


async def refused(scripted: ScriptedEngine, said: AttachSpec) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        async with attaching(scripted, said):
            pass
    return caught.value


async def test_vllm_engine_gives_the_facts_of_its_card() -> None:
    async with scripted_engine() as scripted, attaching(scripted, at("vllm")) as attached:
        assert replace(attached, engine=None) == Attached(  # type: ignore[arg-type]
            engine=None,  # type: ignore[arg-type]
            version="vllm 0.32.0",
            model="tiny",
            tokenizer="tiny-model",
            context_length=2048,
            block_size=32,
            total_kv_blocks=200,
            dp_size=1,
            publishes_kv_events=True,
            warnings=(),
            start="1795280473.03",
            identity={
                "models": "tiny",
                "block size": 32,
                "ranks": [0],
                "context length": 2048,
                "KV format": "unknown",
            },
        )


@KINDS
async def test_probe_tells_an_engine_of_which_only_the_url_is_known(kind: str) -> None:
    async with scripted_engine(pages=PAGES[kind]) as scripted:
        found = await probe(AttachSpec(kind=kind, url=scripted.url, worker_id=W))
        assert (found.model, found.block_size) == ("tiny", 16 if kind == "sglang" else 32)


async def test_probe_asks_once_and_has_the_reason_of_an_engine_that_is_not_up() -> None:
    with pytest.raises(NotAnswered, match="nothing listens at its host and port"):
        async with asyncio.timeout(30):
            await probe(AttachSpec(kind="vllm", url="http://127.0.0.1:1", worker_id=W))


async def test_vllm_aliases_and_adapters_are_on_its_card() -> None:
    async with scripted_engine() as scripted:
        models = scripted.json("/v1/models")
        base = models["data"][0]
        models["data"] = [base, {**base, "id": "alias"}, {**base, "id": "french", "parent": "tiny"}]
        scripted.set_json("/v1/models", models)
        async with attaching(scripted, at("vllm")) as attached:
            card = card_of(attached, at("vllm"))
    assert card.names == {"alias": None, "french": "french"}
    assert card.runtime_config.taints == {"kvrouter.adapter/french"}


async def test_prefill_vllm_engine_without_a_kv_connector_is_warned_of() -> None:
    said = at("vllm", role=Role.PREFILL)
    async with scripted_engine() as scripted:
        async with attaching(scripted, said) as attached:
            assert ["NixlConnector" in warning for warning in attached.warnings] == [True]
        metrics = scripted.pages["/metrics"].pieces[0].decode()
        scripted.set_page("/metrics", metrics + 'vllm:nixl_bytes_transferred_count{engine="0"} 0.0\n')
        async with attaching(scripted, said) as attached:
            assert attached.warnings == ()


async def test_sglang_engine_gives_the_facts_of_its_card() -> None:
    said = at("sglang")
    async with scripted_engine(SGLANG_PAGES) as scripted, attaching(scripted, said) as attached:
        assert (attached.version, attached.model) == ("sglang 0.5.23", "tiny")
        assert (attached.block_size, attached.total_kv_blocks, attached.context_length) == (16, 64, 4096)
        assert attached.bootstrap is None
        assert ["--enable-cache-report" in warning for warning in attached.warnings] == [True]


async def test_tensorrt_llm_engine_gives_the_facts_of_its_card() -> None:
    said = at("trtllm")
    async with scripted_engine(TRTLLM_PAGES) as scripted, attaching(scripted, said) as attached:
        assert replace(attached, engine=None) == Attached(  # type: ignore[arg-type]
            engine=None,  # type: ignore[arg-type]
            version="tensorrt_llm 1.3.0",
            model="tiny",
            tokenizer="tiny",
            context_length=4096,
            block_size=32,
            total_kv_blocks=200,
            dp_size=1,
            publishes_kv_events=True,
            warnings=(),
        )


async def test_facts_that_tensorrt_llm_does_not_give_may_be_specified() -> None:
    async with scripted_engine(TRTLLM_PAGES) as scripted:
        del scripted.pages["/prometheus/metrics"]
        scripted.set_json("/metrics", [])
        async with attaching(scripted, at("trtllm")) as attached:
            assert (attached.context_length, attached.block_size) == (None, None)
            assert not attached.publishes_kv_events
            of_blocks, of_context, _ = attached.warnings
            assert "enable_iter_perf_stats" in of_blocks
            assert "--max_seq_len" in of_context
        async with attaching(scripted, at("trtllm", context_length=4096, block_size=64)) as attached:
            assert (attached.context_length, attached.block_size) == (4096, 64)
            assert attached.total_kv_blocks is None
            assert ["enable_iter_perf_stats" in warning for warning in attached.warnings] == [True]
            assert card_of(attached, at("trtllm")).runtime_config.total_kv_blocks is None


async def test_an_old_tensorrt_llm_gets_a_warning() -> None:
    async with scripted_engine(TRTLLM_PAGES) as scripted:
        scripted.set_json("/version", {"version": "1.1.0"})
        async with attaching(scripted, at("trtllm")) as attached:
            assert ["does not tell its load" in warning for warning in attached.warnings] == [True]


async def test_tensorrt_llm_publishes_kv_events_as_specified() -> None:
    async with scripted_engine(TRTLLM_PAGES) as scripted:
        for said, publishes in (
            ({"kv_events": "tcp://h:5557"}, True),
            ({"publishes_kv_events": False}, False),
        ):
            async with attaching(scripted, at("trtllm", **said)) as attached:
                assert attached.publishes_kv_events is publishes


@KINDS
async def test_model_the_engine_does_not_serve_is_refused_with_the_fix(kind: str) -> None:
    async with scripted_engine(PAGES[kind]) as scripted:
        error = await refused(scripted, at(kind, model="big"))
    assert error.param == "model"
    assert error.message.startswith("the engine serves tiny, not 'big'")
    assert ("named big" if kind == "trtllm" else "--served-model-name big") in error.message


@pytest.mark.parametrize(
    ("kind", "reported", "flag"),
    [
        ("vllm", 32, "--block-size"),
        ("sglang", 16, "--page-size"),
        ("trtllm", 32, "kv_cache_config.tokens_per_block"),
    ],
)
async def test_block_size_the_engine_does_not_have_is_refused_with_the_fix(
    kind: str, reported: int, flag: str
) -> None:
    async with scripted_engine(PAGES[kind]) as scripted:
        error = await refused(scripted, at(kind, block_size=64))
        assert error.param == "block_size"
        assert f"have {reported} tokens, not 64" in error.message
        assert f"start the engine with {flag} 64" in error.message
        async with attaching(scripted, at(kind, block_size=reported, model="tiny")) as attached:
            assert attached.block_size == reported


@pytest.mark.parametrize(
    ("kind", "reported", "flag"),
    [
        ("vllm", 2048, "--max-model-len"),
        ("sglang", 4096, "--context-length"),
        ("trtllm", 4096, "--max_seq_len"),
    ],
)
async def test_context_longer_than_the_engines_is_refused_with_the_fix(
    kind: str, reported: int, flag: str
) -> None:
    async with scripted_engine(PAGES[kind]) as scripted:
        error = await refused(scripted, at(kind, context_length=9999))
        assert error.param == "context_length"
        assert f"holds {reported} tokens, not 9999" in error.message
        assert f"start the engine with {flag} 9999" in error.message
        async with attaching(scripted, at(kind, context_length=99)) as attached:
            assert attached.context_length == 99


async def test_kv_events_inside_the_engine_process_alone_are_warned_of() -> None:
    async with scripted_engine() as scripted:
        source = scripted.json("/kv_event_sources")["0"]
        scripted.set_json("/kv_event_sources", {"0": {**source, "endpoint": "inproc://kv"}})
        async with attaching(scripted, at("vllm")) as attached:
            assert not attached.publishes_kv_events
            assert any("at inproc://kv, where its own process" in warning for warning in attached.warnings)
        named = at("vllm", kv_events="tcp://h:1", kv_events_replay="tcp://h:2")
        async with attaching(scripted, named) as attached:
            assert (attached.publishes_kv_events, attached.warnings) == (True, ())


@KINDS
async def test_specified_event_endpoints_win_over_those_of_the_engine(kind: str) -> None:
    said = at(kind, kv_events="tcp://h:5557", kv_events_replay="tcp://h:6557")
    topics: list[str] = []
    for rank, events in events_of(said, {DpRank(0): EventsAt("tcp://e:1", None, "t")}, 2)[0].items():
        assert events.events == f"tcp://h:{5557 + rank}"
        assert events.replay == f"tcp://h:{6557 + rank}"
        topics.append(events.topic)
    assert topics == ["t", "t"]


@KINDS
@pytest.mark.parametrize("flag", ["kv_events", "kv_events_replay"])
@pytest.mark.parametrize(
    "endpoint",
    [
        "http://host:1",
        "tcp://host",
        "tcp://host:x",
        "5557",
        "tcp://:1",
        "tcp://*:1",
        "tcp://h:65536",
        "tcp://h:0",
    ],
)
async def test_invalid_event_endpoint_is_refused_by_its_flag(kind: str, flag: str, endpoint: str) -> None:
    said = {"kv_events": "tcp://h:1", flag: endpoint}
    async with scripted_engine(PAGES[kind]) as scripted:
        error = await refused(scripted, at(kind, **said))
    assert error.param == flag
    assert error.message.startswith("must be tcp://HOST:PORT")


@KINDS
async def test_other_server_at_the_url_is_refused_at_once(kind: str) -> None:
    async with scripted_engine({}) as scripted:
        error = await refused(scripted, at(kind))
    assert error.param == "url"
    assert "is it " in error.message


@KINDS
async def test_engine_that_wants_a_key_is_refused_naming_the_variable(kind: str) -> None:
    async with scripted_engine(PAGES[kind]) as scripted:
        for path in scripted.pages:
            scripted.set_page(path, '{"error":"Unauthorized"}', status=401)
        error = await refused(scripted, at(kind))
    assert "KVROUTER_ENGINE_API_KEY" in error.message


@KINDS
async def test_engine_without_a_named_model_is_refused_unless_one_is_specified(kind: str) -> None:
    async with scripted_engine(PAGES[kind]) as scripted:
        scripted.set_page("/v1/models", "<html>")
        error = await refused(scripted, at(kind))
        assert error.param == "model"
        async with attaching(scripted, at(kind, model="tiny")) as attached:
            assert attached.model == "tiny"
            assert any("is believed" in warning for warning in attached.warnings)


@KINDS
async def test_attach_waits_for_an_engine_that_starts_later(kind: str, set_constants: SetConstants) -> None:
    set_constants(attached_module, PROBE_EVERY_S=0.005)
    async with scripted_engine(PAGES[kind]) as scripted:
        pages = dict(scripted.pages)
        for path in scripted.pages:
            scripted.set_page(path, "loading", status=503)
        attaching_task = asyncio.create_task(attach(replace(at(kind), url=scripted.url)))
        await until(lambda: sum(scripted.asked.values()) >= 3)
        assert not attaching_task.done()
        scripted.pages.update(pages)
        attached = await attaching_task
        await attached.engine.stop()


@KINDS
async def test_attach_gives_up_on_an_engine_that_never_answers(kind: str) -> None:
    async with scripted_engine(PAGES[kind]) as scripted:
        await scripted.stop()
        error = await refused(scripted, at(kind, wait_s=0.0))
    assert error.param == "url"
    assert "no engine answered: http" in error.message
    assert "nothing listens" in error.message


@PUBLISHING_KINDS
async def test_missing_kv_events_or_replay_endpoint_is_warned_of(kind: str) -> None:
    async with scripted_engine(PAGES[kind]) as scripted:
        if kind == "vllm":
            source = scripted.json("/kv_event_sources")["0"]
            scripted.set_json("/kv_event_sources", {"0": {**source, "replay_endpoint": None}})
        else:
            info = scripted.json("/server_info")
            info["kv_events"]["replay_endpoint_port_base"] = None
            scripted.set_json("/server_info", info)
        async with attaching(scripted, at(kind)) as attached:
            assert attached.publishes_kv_events
            assert any("no replay_endpoint" in warning for warning in attached.warnings)
        if kind == "vllm":
            scripted.set_json("/kv_event_sources", {})
        else:
            scripted.set_json("/server_info", {**info, "kv_events": None})
        async with attaching(scripted, at(kind)) as attached:
            assert not attached.publishes_kv_events
            assert any("--kv-events-config" in warning for warning in attached.warnings)
        async with attaching(scripted, at(kind, publishes_kv_events=False)) as attached:
            assert not attached.publishes_kv_events
            assert not any("--kv-events-config" in warning for warning in attached.warnings)


@PUBLISHING_KINDS
async def test_an_engine_without_a_prefix_cache_gets_a_warning(kind: str) -> None:
    async with scripted_engine(PAGES[kind]) as scripted:
        if kind == "vllm":
            scripted.replace("/metrics", 'enable_prefix_caching="True"', 'enable_prefix_caching="False"')
        else:
            scripted.set_json("/server_info", {**scripted.json("/server_info"), "disable_radix_cache": True})
        async with attaching(scripted, at(kind)) as attached:
            assert any("keeps no prefix cache" in warning for warning in attached.warnings)


@pytest.mark.parametrize(
    ("mode", "role", "start_with"),
    [("null", Role.PREFILL, "prefill"), ("prefill", Role.BOTH, "null"), ("decode", Role.PREFILL, "prefill")],
)
async def test_role_that_sglang_does_not_run_is_refused_with_the_fix(
    mode: str, role: Role, start_with: str
) -> None:
    async with scripted_engine(SGLANG_PAGES) as scripted:
        scripted.set_json("/server_info", {**scripted.json("/server_info"), "disaggregation_mode": mode})
        error = await refused(scripted, at("sglang", role=role))
    assert error.param == "role"
    assert f"--disaggregation-mode {start_with}" in error.message


async def test_sglang_prefill_card_has_the_bootstrap_address() -> None:
    async with scripted_engine(SGLANG_PAGES) as scripted:
        scripted.set_json("/server_info", {**scripted.json("/server_info"), "disaggregation_mode": "prefill"})
        async with attaching(scripted, at("sglang", role=Role.PREFILL)) as attached:
            assert attached.bootstrap == ("127.0.0.1", 8998)
            stated = ModelRuntimeConfig(kv_format=KvFormat(connector="nixl", version="0.5.23"))
            card = card_of(attached, at("sglang", role=Role.PREFILL, runtime_config=stated))
    assert (card.runtime_config.bootstrap_host, card.runtime_config.bootstrap_port) == (HERE, 8998)
    expected = KvFormat(engine="sglang", connector="nixl", version="0.5.23")
    assert card.runtime_config.kv_format == expected, "what is stated wins over what the engine reports"
    assert (card.component, card.serves) == ("prefill", ModelType.Prefill)


def card_of(attached: Attached, said: AttachSpec) -> WorkerCard:
    return engine_card(
        replace(said, enable_local_indexer=True),
        attached,
        incarnation=Epoch(5),
        address="tcp://h:1/7/5",
        namespace="n",
        event_source=EventSource(EventTransport.MEMORY),
        here=HERE,
    )


async def test_card_has_the_facts_the_engine_gave() -> None:
    async with scripted_engine() as scripted, attaching(scripted, at("vllm")) as attached:
        card = card_of(attached, at("vllm"))
    assert (card.model, card.block_size, card.context_length, card.dp_size) == ("tiny", 32, 2048, 1)
    assert (card.role, card.component, card.serves) == (
        Role.BOTH,
        "backend",
        ModelType.Chat | ModelType.Completions,
    )
    assert (card.takes_calls, card.publishes_kv_events, card.tokenizer) == (True, True, "tiny-model")
    assert (card.engine, card.engine_silent) == ("vllm 0.32.0", False)
    assert (card.runtime_config.total_kv_blocks, card.runtime_config.enable_local_indexer) == (200, True)

"""What vLLM's server tells of itself: the recorded pages, and pages that contradict them."""

import dataclasses
import re
from collections.abc import AsyncIterator, Callable, Mapping

import pytest
import pytest_asyncio

from kvrouter.core.errors import ConfigError
from kvrouter.core.ids import DpRank, WorkerId, WorkerRank
from kvrouter.core.workers import FORMAT_UNKNOWN, KvFormat, KvTransfers, LoadReport, Role
from kvrouter.engines.kv_events.listener import EventsAt
from kvrouter.engines.openai.engine import Probe
from kvrouter.engines.openai.metrics import Sample, read_metrics
from kvrouter.engines.openai.server import EngineServer
from kvrouter.engines.vllm import introspect
from kvrouter.engines.vllm.attach import VllmClient
from kvrouter.engines.vllm.calls import KEEP_KV
from kvrouter.engines.vllm.introspect import (
    CACHE_METRIC,
    LOAD_METRICS,
    RankInfo,
    VllmInfo,
    ask_info,
    load_reports,
    reachable,
)
from kvrouter.transports.requests.port import WorkerUnreachable
from tests.testing.constants import SetConstants
from tests.testing.scripted_engine import AnswerEnd, ScriptedAnswer, ScriptedEngine, page, scripted_engine

METRICS = "/metrics"
R0, R1 = DpRank(0), DpRank(1)
W = WorkerId(7)


@pytest_asyncio.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with scripted_engine() as engine:
        yield engine


async def ask(engine: ScriptedEngine, *, role: Role = Role.BOTH) -> VllmInfo:
    server = EngineServer(engine.url)
    await server.open()
    try:
        return await ask_info(server, role=role)
    finally:
        await server.close()


def without(engine: ScriptedEngine, path: str, words: str) -> None:
    """Leave out the lines of a page that have these words."""
    lines = engine.pages[path].pieces[0].decode().splitlines()
    engine.set_page(path, "\n".join(line for line in lines if words not in line) + "\n")


def two_ranks(engine: ScriptedEngine, *, block_size: int = 32, n_blocks: int = 200) -> None:
    """The metrics page of an engine of two ranks, of which the second is as reported."""
    lines = engine.pages[METRICS].pieces[0].decode().splitlines()
    second = [
        line.replace('engine="0"', 'engine="1"')
        .replace('block_size="32"', f'block_size="{block_size}"')
        .replace('num_gpu_blocks="200"', f'num_gpu_blocks="{n_blocks}"')
        for line in lines
        if 'engine="0"' in line
    ]
    engine.set_page(METRICS, "\n".join([*second, *lines]) + "\n")


async def test_recorded_pages_give_all_engine_info(engine: ScriptedEngine) -> None:
    info = await ask(engine)
    assert info == VllmInfo(
        version="0.32.0",
        models=("tiny",),
        adapters=(),
        root="tiny-model",
        context_length=2048,
        prefix_caching=True,
        ranks={R0: RankInfo(32, 200)},
        events={R0: EventsAt("tcp://127.0.0.1:16201", "tcp://127.0.0.1:16301", "kv-events")},
        started_s=1.79528047303e09,
    )
    assert info.block_size == 32


async def test_nixl_connector_is_recognized_by_its_metrics(engine: ScriptedEngine) -> None:
    info = await ask(engine)
    assert (info.uses_nixl, info.kv_format) == (False, FORMAT_UNKNOWN)
    text = engine.pages[METRICS].pieces[0].decode()
    engine.set_page(METRICS, text + 'vllm:nixl_bytes_transferred_count{engine="0",model_name="tiny"} 0.0\n')
    info = await ask(engine)
    assert info.uses_nixl
    assert info.kv_format == KvFormat(engine="vllm", version=info.version, connector="nixl")
    engine.replace(METRICS, 'cache_dtype="auto"', 'cache_dtype="fp8_e4m3"')
    assert (await ask(engine)).kv_format.dtype == "fp8_e4m3"


WITH_PLACE = (
    b'{"choices":[{"finish_reason":"length"}],'
    b'"kv_transfer_params":{"do_remote_decode":true,"remote_blocks_expiry_time":7.5}}'
)
WITHOUT_TIME = b'{"choices":[{"finish_reason":"length"}],"kv_transfer_params":{"do_remote_decode":false}}'
WITHOUT_PLACE = b'{"choices":[{"finish_reason":"length"}],"kv_transfer_params":null}'


@pytest.mark.parametrize(
    ("answer", "is_bidirectional"),
    [
        (ScriptedAnswer((WITH_PLACE,)), True),
        (ScriptedAnswer((WITHOUT_TIME,)), False),
        (ScriptedAnswer((WITHOUT_PLACE,)), False),
        (ScriptedAnswer((b"no JSON",)), False),
        (ScriptedAnswer((b"{}",), status=500), False),
        (ScriptedAnswer(ends=AnswerEnd.HELD), False),
    ],
    ids=["place", "no time", "none", "malformed", "refused", "silent"],
)
async def test_bidirectional_kv_is_recognized_by_an_answer_with_a_place(
    engine: ScriptedEngine, set_constants: SetConstants, answer: ScriptedAnswer, is_bidirectional: bool
) -> None:
    text = engine.pages[METRICS].pieces[0].decode()
    engine.set_page(METRICS, text + 'vllm:nixl_bytes_transferred_count{engine="0",model_name="tiny"} 0.0\n')
    set_constants(introspect, CALL_LIMIT_S=0.2 if answer.ends is AnswerEnd.HELD else 10.0)
    engine.answers.append(answer)
    assert (await ask(engine, role=Role.PREFILL)).bidirectional_kv is is_bidirectional
    (call,) = engine.calls
    assert (call.path, call.body["max_tokens"]) == ("/v1/completions", 1)
    assert call.body["kv_transfer_params"] == KEEP_KV


@pytest.mark.parametrize("role", [Role.BOTH, Role.DECODE])
async def test_engine_outside_a_nixl_pair_is_asked_for_no_token(engine: ScriptedEngine, role: Role) -> None:
    assert not (await ask(engine, role=role)).bidirectional_kv
    assert engine.calls == []


@pytest.mark.parametrize(
    ("root", "writes"), [("moonshotai/Kimi-K3-Instruct", True), ("/models/kimi_k3", True), ("kimi-k2", False)]
)
async def test_model_with_choices_in_its_prompt_is_known_by_its_name(
    engine: ScriptedEngine, root: str, writes: bool
) -> None:
    info = await ask(engine)
    assert not info.writes_choices
    assert dataclasses.replace(info, root=root).writes_choices is writes


async def test_adapters_are_distinguished_from_model_aliases(engine: ScriptedEngine) -> None:
    models = engine.json("/v1/models")
    base = models["data"][0]
    models["data"] = [{**base, "id": "lora-a", "parent": "tiny"}, base, {**base, "id": "alias", "root": None}]
    engine.set_json("/v1/models", models)
    info = await ask(engine)
    assert (info.models, info.adapters, info.root) == (("tiny", "alias"), ("lora-a",), "tiny-model")


async def test_ranks_are_in_order_whatever_the_order_of_the_page(engine: ScriptedEngine) -> None:
    two_ranks(engine, n_blocks=150)
    source = engine.json("/kv_event_sources")["0"]
    engine.set_json("/kv_event_sources", {"1": {**source, "endpoint": "tcp://*:16202"}, "0": source})
    info = await ask(engine)
    assert list(info.ranks.items()) == [(R0, RankInfo(32, 200)), (R1, RankInfo(32, 150))]
    assert info.events[R1].events == "tcp://127.0.0.1:16202"


async def test_hash_block_size_takes_precedence_over_the_block_size(engine: ScriptedEngine) -> None:
    engine.replace(METRICS, 'hash_block_size="None"', 'hash_block_size="16"')
    assert (await ask(engine)).block_size == 16


@pytest.mark.parametrize(
    "change",
    [{"enable_kv_cache_events": False}, {"publisher": "null"}, {"publisher": None}, {"endpoint": None}],
)
async def test_a_rank_without_events_has_no_source(engine: ScriptedEngine, change: dict[str, object]) -> None:
    source = engine.json("/kv_event_sources")["0"]
    engine.set_json("/kv_event_sources", {"0": {**source, **change}})
    assert (await ask(engine)).events == {}


async def test_missing_pages_of_older_servers_leave_info_unknown(engine: ScriptedEngine) -> None:
    del engine.pages["/kv_event_sources"], engine.pages["/version"]
    without(engine, METRICS, "process_start_time")
    info = await ask(engine)
    assert (info.version, info.events, info.started_s) == ("", {}, None)


async def test_server_without_a_models_page_is_refused(engine: ScriptedEngine) -> None:
    del engine.pages["/v1/models"]
    with pytest.raises(ConfigError, match=r"^http://.* has no /v1/models: is it vLLM's server\?") as caught:
        await ask(engine)
    assert caught.value.param == "url"


async def test_server_of_another_engine_is_refused_by_its_model_owner(engine: ScriptedEngine) -> None:
    engine.replace("/v1/models", '"owned_by":"vllm"', '"owned_by":"sglang"')
    with pytest.raises(ConfigError, match="owned by 'sglang', not 'vllm': is it vLLM's server"):
        await ask(engine)


async def test_engine_without_a_model_yet_is_unreachable(engine: ScriptedEngine) -> None:
    engine.set_json("/v1/models", {"object": "list", "data": []})
    with pytest.raises(WorkerUnreachable, match="no model yet"):
        await ask(engine)


def _two_sizes(engine: ScriptedEngine) -> None:
    two_ranks(engine, block_size=16)


R = RankInfo
UNKNOWN: Mapping[str, tuple[Callable[[ScriptedEngine], object], str, str, object]] = {
    "two sizes": (_two_sizes, r"\{16, 32\}|\{32, 16\}", "ranks", {R0: R(None, 200), R1: R(None, 200)}),
    "a count": (lambda e: e.replace(METRICS, 'num_gpu_blocks="200"', 'num_gpu_blocks="None"'),
                "num_gpu_blocks", "ranks", {R0: R(32, None)}),
    "a size": (lambda e: e.replace(METRICS, ',block_size="32"', ',block_size="-1"'),
               "block_size", "ranks", {R0: R(None, 200)}),
    "no cache": (lambda e: without(e, METRICS, CACHE_METRIC), "--disable-log-stats", "ranks", {R0: R()}),
    "no metrics": (lambda e: e.pages.pop(METRICS), "has no /metrics", "ranks", {R0: R()}),
    "ill metrics": (lambda e: e.set_page(METRICS, "no", status=500), "answered 500", "ranks", {R0: R()}),
    "odd metrics": (lambda e: e.set_page(METRICS, 'vllm:cache_config_info{engine="0} 1\n'),
                    "cannot be read", "ranks", {R0: R()}),
    "no length": (lambda e: e.replace("/v1/models", '"max_model_len":2048', '"max_model_len":null'),
                  "max_model_len", "context_length", None),
    "an odd length": (lambda e: e.replace("/v1/models", '"max_model_len":2048', '"max_model_len":"long"'),
                      "max_model_len", "context_length", None),
    "a length as text": (lambda e: e.replace("/v1/models", '"max_model_len":2048', '"max_model_len":"2048"'),
                         "", "context_length", 2048),
    "an odd root": (lambda e: e.replace("/v1/models", '"root":"tiny-model"', '"root":[1]'),
                    "", "root", "tiny"),
    "odd sources": (lambda e: e.set_page("/kv_event_sources", "[]"), "/kv_event_sources", "events", {}),
    "an odd version": (lambda e: e.set_page("/version", "{"), "/version", "version", ""),
    "another version": (lambda e: e.set_page("/version", "[1]"), "/version", "version", ""),
    "no version": (lambda e: e.pages.pop("/version"), "/version", "version", ""),
}  # fmt: skip


@pytest.mark.parametrize("what", UNKNOWN)
async def test_unreadable_info_is_unknown_and_named(engine: ScriptedEngine, what: str) -> None:
    change, says, name, value = UNKNOWN[what]
    change(engine)
    info = await ask(engine)
    assert getattr(info, name) == value
    assert (len(info.missing), re.search(says, " ".join(info.missing)) is not None) == (bool(says), True)


@pytest.mark.parametrize(
    ("endpoint", "url", "expected"),
    [
        ("tcp://*:5557", "http://gpu-3:8000", "tcp://gpu-3:5557"),
        ("tcp://0.0.0.0:5557", "https://10.0.0.3", "tcp://10.0.0.3:5557"),
        ("tcp://[::]:5557", "http://[fd00::3]:8000", "tcp://[fd00::3]:5557"),
        ("tcp://10.0.0.9:5557", "http://gpu-3:8000", "tcp://10.0.0.9:5557"),
        ("ipc:///run/events", "http://gpu-3:8000", "ipc:///run/events"),
    ],
)
def test_wildcard_event_endpoint_gets_the_host_of_the_server_url(
    endpoint: str, url: str, expected: str
) -> None:
    assert reachable(endpoint, url) == expected


def test_only_requested_metrics_are_read_from_a_page() -> None:
    samples = read_metrics(page("vllm-0.32.0-metrics.txt"), ("vllm:num_requests_waiting",))
    assert samples == {
        "vllm:num_requests_waiting": [Sample({"engine": "0", "model_name": "tiny"}, 0.0)]
    }  # and nothing of vllm:num_requests_waiting_by_reason
    assert read_metrics(b"", LOAD_METRICS) == {}


def reports(text: str, ranks: dict[DpRank, RankInfo]) -> list[LoadReport]:
    return load_reports(read_metrics(text.encode(), LOAD_METRICS), ranks, W)


USED = 'vllm:kv_cache_usage_perc{{engine="{}"}} {}\n'


def test_loads_are_reported_for_each_rank() -> None:
    text = "".join(
        [
            USED.format(0, 0.25),
            USED.format(1, 0.5),
            'vllm:num_requests_running{engine="1"} 3.0\nvllm:num_requests_waiting{engine="1"} 2.0\n',
        ]
    )
    assert reports(text, {R0: RankInfo(32, 200), R1: RankInfo(32, 100)}) == [
        LoadReport(rank=WorkerRank(W, R0), active_blocks=50, total_blocks=200),
        LoadReport(
            rank=WorkerRank(W, R1), active_blocks=50, total_blocks=100, running_requests=3, waiting_requests=2
        ),
    ]


FETCHED = (
    'vllm:nixl_bytes_transferred_count{engine="0"} 3.0\n'
    'vllm:nixl_bytes_transferred_sum{engine="0"} 393216.0\n'
    'vllm:nixl_xfer_time_seconds_sum{engine="0"} 0.25\n'
    'vllm:nixl_num_failed_transfers_total{engine="0"} 1.0\n'
    'vllm:prompt_tokens_by_source_total{engine="0",source="local_compute"} 9.0\n'
    'vllm:prompt_tokens_by_source_total{engine="0",source="external_kv_transfer"} 768.0\n'
)


@pytest.mark.parametrize(
    ("lacks", "reported"),
    [
        (None, KvTransfers(transfers=3, bytes=393216, seconds=0.25, failed=1, tokens=768)),
        ("failed", KvTransfers(transfers=3, bytes=393216, seconds=0.25, tokens=768)),
        ("external", KvTransfers(transfers=3, bytes=393216, seconds=0.25, failed=1)),
        ("_count", None),
        ("bytes_transferred_sum", None),
        ("seconds_sum", None),
    ],
)
def test_kv_transfers_are_reported_if_the_page_has_what_they_need(
    lacks: str | None, reported: KvTransfers | None
) -> None:
    lines = [line for line in FETCHED.splitlines() if lacks is None or lacks not in line]
    text = "\n".join([USED.format(0, 0.25) + USED.format(1, 0.5), *lines, ""])
    first, second = reports(text, {R0: RankInfo(32, 200), R1: RankInfo(32, 200)})
    assert (first.kv_transfers, second.kv_transfers) == (reported, None)


def test_kv_transfers_of_several_connectors_are_summed() -> None:
    tokens = [line for line in FETCHED.splitlines() if "by_source" in line]
    by_nixl = [line for line in FETCHED.splitlines() if "nixl" in line]
    by_mooncake = [line.replace("nixl", "mooncake") for line in by_nixl]

    def fetched(*lines: str) -> KvTransfers | None:
        page = "\n".join([USED.format(0, 0.25), *lines, *tokens, ""])
        (report,) = reports(page, {R0: RankInfo(32, 200)})
        return report.kv_transfers

    once = KvTransfers(transfers=3, bytes=393216, seconds=0.25, failed=1, tokens=768)
    assert fetched(*by_nixl) == fetched(*by_mooncake) == once
    twice = KvTransfers(transfers=6, bytes=786432, seconds=0.5, failed=2, tokens=768)
    assert fetched(*by_nixl, *by_mooncake) == twice


@pytest.mark.parametrize("value", ["-1", "NaN", "+Inf", "1e300"])
def test_impossible_metric_value_counts_as_not_reported(value: str) -> None:
    text = USED.format(0, 0.25) + FETCHED.replace("393216.0", value)
    (report,) = reports(text, {R0: RankInfo(32, 200)})
    assert report.kv_transfers is None
    assert reports(USED.format(0, value), {R0: RankInfo(32, 200)}) == []


@pytest.mark.parametrize(
    ("text", "n_reports"),
    [
        ('vllm:gpu_cache_usage_perc{engine="0"} 0.1\n', 1),
        ("vllm:kv_cache_usage_perc 0.1\n", 0),
        (USED.format("x", 0.1), 0),
        (USED.format(0, "NaN"), 0),
        (USED.format(0, "+Inf"), 0),
        (USED.format(3, 0.1), 0),
        (USED.format(0, 0.1) + 'vllm:num_requests_running{engine="0"} NaN\n', 1),
    ],
)
def test_rank_without_load_metrics_has_no_load_report(text: str, n_reports: int) -> None:
    assert len(reports(text, {R0: RankInfo(32, 200)})) == n_reports


async def test_probe_gives_the_loads_and_the_start_time(engine: ScriptedEngine) -> None:
    server = EngineServer(engine.url)
    await server.open()
    try:
        ways = VllmClient(W, await ask_info(server), model="tiny")
        look = await ways.look(server)
        assert [report.total_blocks for report in look.loads] == [200]
        assert look.started == 1.79528047303e09
        metrics = engine.pages.pop(METRICS)
        assert await ways.look(server) == Probe(())
        engine.set_page(METRICS, "no", status=500)
        assert await ways.look(server) == Probe(())
        engine.replace("/v1/models", '"id":"tiny"', '"id":"big"')
        with pytest.raises(WorkerUnreachable, match="with other models: big, not tiny"):
            await ways.look(server)
        engine.pages[METRICS] = metrics
        assert (await ways.look(server)).loads == look.loads
    finally:
        await server.close()


async def test_an_engine_restarted_with_another_kv_format_is_another_one(
    engine: ScriptedEngine,
) -> None:
    server = EngineServer(engine.url)
    await server.open()
    try:
        ways = VllmClient(W, await ask_info(server), model="tiny")
        engine.replace(METRICS, "1.79528047303e+09", "1.8e+09")
        engine.set_page(
            METRICS, engine.pages[METRICS].pieces[0] + b'vllm:nixl_bytes_transferred_count{engine="0"} 0\n'
        )
        with pytest.raises(WorkerUnreachable, match="other KV format: engine=vllm"):
            await ways.look(server)
    finally:
        await server.close()


@pytest.mark.parametrize(("first", "second"), [(WITHOUT_PLACE, WITH_PLACE), (WITH_PLACE, WITHOUT_PLACE)])
async def test_an_engine_restarted_without_bidirectional_kv_is_another_one(
    engine: ScriptedEngine, first: bytes, second: bytes
) -> None:
    """One that did not show it before may have been slow, and is given nothing to fetch."""
    text = engine.pages[METRICS].pieces[0].decode()
    engine.set_page(METRICS, text + 'vllm:nixl_bytes_transferred_count{engine="0",model_name="tiny"} 0.0\n')
    engine.answers.extend([ScriptedAnswer((first,)), ScriptedAnswer((second,))])
    server = EngineServer(engine.url)
    await server.open()
    try:
        ways = VllmClient(W, await ask_info(server, role=Role.DECODE), model="tiny", role=Role.DECODE)
        await ways.look(server)
        engine.replace(METRICS, "1.79528047303e+09", "1.8e+09")
        if second == WITH_PLACE:
            assert (await ways.look(server)).started == 1.8e9
        else:
            with pytest.raises(WorkerUnreachable, match="other bidirectional KV: None, not True"):
                await ways.look(server)
    finally:
        await server.close()

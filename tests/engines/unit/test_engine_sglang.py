"""How SGLang is asked, and what its server tells of itself."""

import json
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import pytest
import pytest_asyncio

from kvrouter.core.errors import ConfigError, ProtocolError
from kvrouter.core.ids import DpRank, WorkerId, WorkerRank
from kvrouter.core.requests import (
    Bootstrap,
    CallRoute,
    ClientCall,
    EngineRequest,
    FinishReason,
    Leg,
)
from kvrouter.core.workers import FORMAT_UNKNOWN, KvFormat, LoadReport, Role
from kvrouter.engines.kv_events.listener import EventsAt
from kvrouter.engines.openai.answer_events import Unasked
from kvrouter.engines.openai.engine import EngineCall
from kvrouter.engines.openai.server import EngineServer
from kvrouter.engines.openai.sse import AnswerReading
from kvrouter.engines.openai.streams import SseStream
from kvrouter.engines.sglang.attach import SglangClient, ask_start
from kvrouter.engines.sglang.calls import GenerateReader, call_of
from kvrouter.engines.sglang.introspect import SglangInfo, ask_info, ask_loads
from kvrouter.transports.requests.port import EngineFailed, WorkerUnreachable
from tests.testing.engine_requests import client_call as client
from tests.testing.engine_requests import full_request as leg
from tests.testing.scripted_engine import (
    SGLANG_PAGES,
    ScriptedAnswer,
    ScriptedEngine,
    page,
    scripted_engine,
    sse,
)

CHAT: dict[str, object] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hi"}],
    "temperature": 0.1,
    "stream": True,
    "stop": ["END"],
    "min_p": 0.2,
    "never_heard_of": 1,
}
MEETING = Bootstrap(host="10.0.0.3", port=8998, room=2**62 + 1)
MET = {"bootstrap_host": "10.0.0.3", "bootstrap_port": 8998, "bootstrap_room": 2**62 + 1}
R0, R1 = DpRank(0), DpRank(1)
W = WorkerId(7)


def passing(*, added_token_ids: bool = False, added_usage: bool = False) -> AnswerReading:
    return AnswerReading(
        passes_raw=True, added_token_ids=added_token_ids, unasked=Unasked.NOTHING, added_usage=added_usage
    )


def asked(request: EngineRequest, n_ranks: int = 1) -> tuple[EngineCall, dict[str, Any]]:
    """Return the call, and its body with ``rid`` up to what makes it the only one of its name."""
    call = call_of(request, n_ranks=n_ranks)
    body = json.loads(call.body)
    body["rid"] = body["rid"].rpartition("#")[0]
    return call, body


@pytest.mark.parametrize("call", [None, client(CHAT)], ids=["tokens", "as written"])
def test_every_call_has_its_own_rid(call: ClientCall | None) -> None:
    rids = {json.loads(call_of(leg(call)).body)["rid"] for _ in range(9)}
    assert len(rids) == 9


@pytest.mark.parametrize("route", [CallRoute.GENERATE, CallRoute.EMBEDDINGS, CallRoute.RESPONSES])
def test_rid_of_the_client_is_not_passed_on(route: CallRoute) -> None:
    """SGLang aborts every request whose rid begins with that of one that is aborted: an empty one is all."""
    written = client({"model": "tiny", "text": "a", "rid": "", "request_id": "r"})
    call = ClientCall(route, written.body, stream=False, resumable=False)
    body = json.loads(call_of(leg(call)).body)
    assert "request_id" not in body
    if route is CallRoute.GENERATE:
        assert body["rid"].startswith("r-i#1#aggregated#")
    else:
        assert "rid" not in body


def test_streamed_chat_is_sent_as_written_with_rid_and_usage() -> None:
    call, body = asked(leg(client(CHAT)))
    assert body == {**CHAT, "rid": "r-i#1#aggregated", "stream_options": {"include_usage": True}}
    assert (call.path, call.streams) == ("/v1/chat/completions", True)
    assert call.reading == passing(added_usage=True)


def test_usage_asked_for_by_the_client_is_passed() -> None:
    said = {**CHAT, "stream_options": {"include_usage": True}}
    call, body = asked(leg(client(said)))
    assert (body["stream_options"], call.reading) == (said["stream_options"], passing())


COMPLETION: dict[str, object] = {"model": "tiny", "prompt": "hi", "stream": True}
SAYS_TOKENS = {"return_token_ids": True}


def test_token_ids_are_asked_for_only_in_resumable_streamed_completions() -> None:
    plain = client(COMPLETION)
    call, body = asked(leg(plain))
    assert (body["return_token_ids"], call.reading) == (True, passing(added_token_ids=True, added_usage=True))
    for other in (
        client(COMPLETION, resumable=False),
        client({**COMPLETION, "stream": False}),
        client(CHAT),
    ):
        call, body = asked(leg(other))
        assert ("return_token_ids" in body, call.reading.added_token_ids) == (False, False)
    assert "return_token_ids" not in asked(leg(plain, Leg.PREFILL))[1]
    wanted = client({**COMPLETION, **SAYS_TOKENS})
    assert asked(leg(wanted))[0].reading == passing(added_usage=True)


async def test_added_token_ids_are_removed_from_a_recorded_completion() -> None:
    recorded = page("sglang-0.5.23-completion-tokens.sse")
    async with scripted_engine(SGLANG_PAGES, ScriptedAnswer((recorded,))) as engine:
        server = EngineServer(engine.url)
        await server.open()
        stream = SseStream(server.post("/v1/completions", b"{}"), passing(added_token_ids=True))
        chunks = [chunk async for chunk in stream]
        await server.close()
    assert [token for chunk in chunks for token in chunk.token_ids] == [1309, 722, 504, 1369]
    events = [json.loads(line[6:]) for line in recorded.splitlines() if line.startswith(b"data: {")]
    for event in events:
        for name in ("token_ids", "prompt_token_ids"):
            event["choices"][0].pop(name, None)
    assert b"".join(chunk.raw for chunk in chunks) == sse(*events)
    assert sum(chunk.text_chars or 0 for chunk in chunks) == len(" calledandmodule CO")


def test_both_legs_get_the_same_call_and_bootstrap_room() -> None:
    prefill, sent_to_prefill = asked(leg(client(CHAT), Leg.PREFILL, bootstrap=MEETING))
    decode, sent_to_decode = asked(leg(client(CHAT), Leg.DECODE, bootstrap=MEETING))
    assert sent_to_prefill == {**CHAT, **MET, "stream": False, "rid": "r-i#1#prefill"}
    assert sent_to_decode == {
        **CHAT,
        **MET,
        "rid": "r-i#1#decode",
        "stream_options": {"include_usage": True},
    }
    assert (prefill.streams, prefill.reading) == (
        False,
        AnswerReading(passes_raw=False, unasked=Unasked.NOTHING),
    )
    assert (decode.streams, decode.reading) == (True, passing(added_usage=True))


@pytest.mark.parametrize("kind", list(Leg))
def test_tokens_are_sent_to_the_generate_route(kind: Leg) -> None:
    call, body = asked(leg(None, kind, bootstrap=MEETING))
    is_prefill = kind is Leg.PREFILL
    assert body == {
        "input_ids": [5, 6, 7],
        "sampling_params": {
            "max_new_tokens": 9, "min_new_tokens": 2, "temperature": 0.5, "top_p": 1.0, "top_k": -1,
            "frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "ignore_eos": False,
            "stop_token_ids": [2], "sampling_seed": 3,
        },
        "stream": not is_prefill,
        "rid": f"r-i#1#{kind}",
        **MET,
    }  # fmt: skip
    assert (call.path, call.streams) == ("/generate", not is_prefill)
    assert call.reading == AnswerReading(passes_raw=False)
    assert isinstance(call.reader(), GenerateReader)
    assert call.reader() is not call.reader()


def test_resumed_call_keeps_client_sampling_and_has_no_stop_strings() -> None:
    call, body = asked(leg(client(CHAT), resumed_tokens=1))
    assert call.path == "/generate"
    assert body["sampling_params"] == {
        "max_new_tokens": 9, "min_new_tokens": 2, "temperature": 0.1, "min_p": 0.2
    }  # fmt: skip
    assert "messages" not in body


@pytest.mark.parametrize("kind", list(Leg))
@pytest.mark.parametrize("call", [client(CHAT), None])
def test_every_leg_has_its_salt_its_adapter_and_its_rank(kind: Leg, call: ClientCall | None) -> None:
    request = leg(call, kind, cache_namespace="tenant", lora_name="lora-a", dp_rank=R1)
    _, body = asked(request, n_ranks=2)
    assert (body["cache_salt"], body["lora_path"], body["routed_dp_rank"]) == ("tenant", "lora-a", 1)
    assert not {"cache_salt", "lora_path", "routed_dp_rank", *MET} & set(asked(leg(call, kind))[1])


@pytest.mark.parametrize("kind", list(Leg))
@pytest.mark.parametrize("tenant", ["a", None])
def test_extra_key_of_the_client_is_not_passed_on(kind: Leg, tenant: str | None) -> None:
    _, body = asked(leg(client({**CHAT, "extra_key": "b"}), kind, cache_namespace=tenant))
    assert ("extra_key" in body, body.get("cache_salt")) == (False, tenant)


@pytest.mark.parametrize("options", [1, "a", [1], {"include_usage": "maybe"}, {"include_usage": "yes"}])
def test_unclear_stream_options_are_passed_unchanged(options: object) -> None:
    call, body = asked(leg(client({**CHAT, "stream": True, "stream_options": options})))
    assert (body["stream_options"], call.reading.added_usage) == (options, False)


def reported(output_ids: list[int], completion_tokens: int, finish: object = None) -> bytes:
    meta = {"finish_reason": finish, "completion_tokens": completion_tokens, "prompt_tokens": 3}
    return json.dumps({"output_ids": output_ids, "meta_info": meta}).encode()


@pytest.mark.parametrize(
    ("finish", "expected"),
    [
        ({"type": "stop", "matched": 2}, FinishReason.STOP),
        ({"type": "length", "length": 1}, FinishReason.LENGTH),
        ({"type": "abort", "message": "left"}, FinishReason.CANCELLED),
    ],
)
def test_finish_reason_is_read_from_the_answer(finish: object, expected: FinishReason) -> None:
    assert GenerateReader()(reported([1], 1, finish)).finish is expected


def test_abort_with_a_status_is_an_error_without_tokens() -> None:
    event = GenerateReader()(reported([0], 1, {"type": "abort", "message": "no room", "status_code": 503}))
    assert event.error is not None
    assert (event.error.message, event.error.code, event.token_ids) == ("no room", 503, ())


def test_unstreamed_answer_is_read() -> None:
    event = GenerateReader()(page("sglang-0.5.23-generate.json"))
    assert (event.token_ids, event.finish) == ((1309,), FinishReason.LENGTH)
    assert event.usage is not None
    assert event.usage.cached_tokens == 0


@pytest.mark.parametrize("data", [b"{", b"[]", b'{"output_ids":"x"}', b'{"output_ids":[-1.5]}', b"\xff"])
def test_malformed_answer_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError) as caught:
        GenerateReader()(data)
    assert caught.value.param == "data"


def test_answer_that_counts_more_tokens_than_it_has_is_refused() -> None:
    reader = GenerateReader()
    reader(reported([1], 1))
    with pytest.raises(ProtocolError) as caught:
        reader(reported([3], 3))
    assert caught.value.param == "output_ids"


@pytest_asyncio.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with scripted_engine(SGLANG_PAGES) as engine:
        yield engine


@pytest_asyncio.fixture
async def server(engine: ScriptedEngine) -> AsyncIterator[EngineServer]:
    server = EngineServer(engine.url)
    await server.open()
    yield server
    await server.close()


def change(engine: ScriptedEngine, **fields: object) -> None:
    engine.set_json("/server_info", {**engine.json("/server_info"), **fields})


async def test_recorded_pages_give_all_engine_info(server: EngineServer) -> None:
    info = await ask_info(server)
    assert info == SglangInfo(
        version="0.5.23",
        model="tiny",
        tokenizer="tiny-model",
        context_length=4096,
        block_size=16,
        total_blocks=64,
        dp_size=1,
        prefix_caching=True,
        tells_cached_tokens=False,
        tells_usage=False,
        role=Role.BOTH,
        bootstrap_port=8998,
        events={R0: EventsAt("tcp://127.0.0.1:16401", "tcp://127.0.0.1:16501", "kv-events")},
        started=info.started,
    )
    assert info.started


async def test_each_rank_has_the_next_event_port(engine: ScriptedEngine, server: EngineServer) -> None:
    events = {**engine.json("/server_info")["kv_events"], "dp_size": 2, "endpoint_host": "fd00::3"}
    change(engine, dp_size=2, kv_events={**events, "replay_endpoint_port_base": None})
    assert (await ask_info(server)).events == {
        R0: EventsAt("tcp://[fd00::3]:16401", None, "kv-events"),
        R1: EventsAt("tcp://[fd00::3]:16402", None, "kv-events"),
    }


@pytest.mark.parametrize("events", [None, {"publisher": "null"}])
async def test_an_engine_without_events_has_no_sources(
    engine: ScriptedEngine, server: EngineServer, events: object
) -> None:
    change(engine, kv_events=events)
    assert (await ask_info(server)).events == {}


@pytest.mark.parametrize(
    ("mode", "role"),
    [("prefill", Role.PREFILL), ("decode", Role.DECODE), ("null", Role.BOTH), (["prefill"], Role.BOTH)],
)
async def test_disaggregation_mode_gives_the_role(
    engine: ScriptedEngine, server: EngineServer, mode: object, role: Role
) -> None:
    change(engine, disaggregation_mode=mode)
    info = await ask_info(server)
    known = FORMAT_UNKNOWN if role is Role.BOTH else KvFormat(engine="sglang", connector="mooncake")
    assert (info.role, info.kv_format) == (role, known)


@pytest.mark.parametrize(("mode", "kind"), [("prefill", Leg.PREFILL), ("decode", Leg.DECODE)])
async def test_prefill_or_decode_engine_fails_requests_without_bootstrap(
    engine: ScriptedEngine, server: EngineServer, mode: str, kind: Leg
) -> None:
    change(engine, disaggregation_mode=mode)
    ways = SglangClient(W, await ask_info(server))
    for request in (leg(client(CHAT)), leg(None, kind)):
        with pytest.raises(EngineFailed, match=f"{mode} mode takes no request without"):
            ways.call_of(request)
    sent = json.loads(ways.call_of(leg(client(CHAT), kind, bootstrap=MEETING)).body)
    assert sent.items() >= MET.items()


async def test_server_without_a_models_page_is_refused(engine: ScriptedEngine, server: EngineServer) -> None:
    del engine.pages["/v1/models"]
    with pytest.raises(ConfigError, match=r"^http://.* has no /v1/models: is it SGLang's server\?"):
        await ask_info(server)


UNKNOWN: Mapping[str, tuple[Callable[[ScriptedEngine], object], str, str]] = {
    "no size": (lambda e: change(e, page_size=0), "page_size", "block_size"),
    "an odd size": (lambda e: change(e, page_size=None), "page_size", "block_size"),
    "an odd count": (lambda e: change(e, max_total_num_tokens="x"), "max_total_num_tokens", "total_blocks"),
    "no page": (lambda e: e.set_page("/server_info", "<html>"), "/server_info", "block_size"),
    "no text": (lambda e: e.set_page("/server_info", b"\xff"), "/server_info", "block_size"),
    "nothing": (lambda e: e.pages.pop("/server_info"), "/server_info", "block_size"),
    "no length": (
        lambda e: e.set_json("/v1/models", {"data": [{"id": "tiny"}]}),
        "max_model_len",
        "context_length",
    ),
}


@pytest.mark.parametrize("what", UNKNOWN)
async def test_unreadable_info_is_unknown_and_named(
    engine: ScriptedEngine, server: EngineServer, what: str
) -> None:
    spoil, says, name = UNKNOWN[what]
    spoil(engine)
    info = await ask_info(server)
    (missing,) = info.missing
    assert (says in missing, getattr(info, name)) == (True, None)


async def test_loads_are_reported_for_each_rank(engine: ScriptedEngine, server: EngineServer) -> None:
    load = engine.json("/v1/loads")["loads"][0]
    busy = {"dp_rank": 1, "num_running_reqs": 3, "num_waiting_reqs": 2, "num_waiting_uncached_tokens": 40,
            "num_used_tokens": 17}  # fmt: skip
    engine.set_json("/v1/loads", {"loads": [load, {**load, **busy}]})
    assert await ask_loads(server, W, 16, model="tiny") == (
        LoadReport(rank=WorkerRank(W, R0), active_blocks=0, total_blocks=64, active_prefill_tokens=0),
        LoadReport(
            rank=WorkerRank(W, R1),
            active_blocks=2,
            total_blocks=64,
            active_prefill_tokens=40,
            running_requests=3,
            waiting_requests=2,
        ),
    )
    engine.set_page("/v1/loads", "[]")
    assert await ask_loads(server, W, 16, model="tiny") == ()
    with pytest.raises(WorkerUnreachable, match="with other models"):
        await ask_loads(server, W, 16, model="big")
    del engine.pages["/v1/loads"]
    assert await ask_loads(server, W, 16, model="tiny") == ()


async def test_start_is_asked_again_only_after_a_failed_probe(
    engine: ScriptedEngine, server: EngineServer
) -> None:
    info = await ask_info(server)
    ways = SglangClient(W, info)
    assert [(await ways.look(server)).started for _ in range(2)] == [None] * 2, "nothing was observed"
    assert engine.asked["/server_info"] == 1
    pages = dict(engine.pages)
    for path in ("/v1/loads", "/v1/models"):
        engine.set_page(path, "", status=500)
    change(engine, startup_time={"load_weight": 9.0})
    with pytest.raises(WorkerUnreachable):
        await ways.look(server)
    for path in ("/v1/loads", "/v1/models"):
        engine.pages[path] = pages[path]
    started = (await ways.look(server)).started
    assert started not in (None, info.started)
    assert started == await ask_start(server)
    last = await ways.look(server)
    assert (bool(last.loads), last.started) == (True, None)
    assert engine.asked["/server_info"] == 3

"""TensorRT-LLM's legs from end to end: what its server is sent, and what the router gets."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from kvrouter.app.attach.attachment import attach
from kvrouter.cli.up.run import embedded
from kvrouter.core.ids import WorkerId
from kvrouter.core.requests import EngineChunk, EngineRequest, FinishReason, KvLoss, Leg
from kvrouter.core.workers import LoadReport
from kvrouter.engines.attach import AttachSpec
from kvrouter.engines.port import Engine, EngineState, WatchedEngine
from kvrouter.fleetfile.fleet_checks import load_fleet
from kvrouter.settings.problems import parse_document
from kvrouter.settings.tree import FrontendSettings, Settings
from kvrouter.transports.requests.port import StreamBroken
from tests.testing.engine_recorder import EventRecorder
from tests.testing.engine_requests import client_call, engine_request
from tests.testing.scripted_engine import JSON, ScriptedAnswer, page
from tests.testing.trtllm_server import ScriptedTrtllm, created, native, scripted_trtllm, stored
from tests.testing.waits import until

CALL: dict[str, object] = {"model": "tiny", "prompt": "hi", "max_tokens": 3}
CHAT: dict[str, object] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}
CONTEXT = ScriptedAnswer((page("trtllm-1.3.0-completion-context.json"),), content_type=JSON)
ENDED = ScriptedAnswer((page("trtllm-1.3.0-chat-context-stop.json"),), content_type=JSON)


def asked_for(scripted: ScriptedTrtllm) -> AttachSpec:
    return AttachSpec(kind="trtllm", worker_id=WorkerId(7), url=scripted.url, wait_s=60.0)


@asynccontextmanager
async def serving(scripted: ScriptedTrtllm) -> AsyncIterator[Engine]:
    at = replace(asked_for(scripted), publishes_kv_events=False)
    attached = await attach(at)
    try:
        yield attached.engine
    finally:
        await attached.engine.stop()


async def read(engine: Engine, request: EngineRequest) -> list[EngineChunk]:
    return [chunk async for chunk in await engine.submit(request)]


async def prefilled(engine: Engine, body: dict[str, object]) -> EngineChunk:
    (chunk,) = await read(engine, engine_request(kind=Leg.PREFILL, call=client_call(body)))
    assert chunk.raw == b""
    return chunk


def decode(body: dict[str, object], chunk: EngineChunk) -> EngineRequest:
    return engine_request(
        kind=Leg.DECODE, call=client_call(body), kv_transfer_params=chunk.kv_transfer_params
    )


async def test_first_token_of_a_handoff_is_given_once() -> None:
    stream = ScriptedAnswer((page("trtllm-1.3.0-chat.sse"),))
    async with scripted_trtllm() as scripted, serving(scripted) as engine:
        scripted.answers.extend((CONTEXT, stream))
        chunk = await prefilled(engine, CHAT)
        assert (chunk.finish, chunk.cached_tokens, chunk.token_ids) == (FinishReason.LENGTH, 2, ())
        chunks = await read(engine, decode(CHAT, chunk))
        raw = b"".join(chunk.raw for chunk in chunks)
        assert raw.count(b'"content":"one"') == 1
        assert b'"usage"' not in raw
        assert chunks[-1].finish is FinishReason.LENGTH
        sent = scripted.calls[1].body
        assert sent["disaggregated_params"]["first_gen_tokens"] == [606]
        assert sent["disaggregated_params"]["disagg_request_id"] == 2049
        assert 2**62 <= scripted.calls[0].body["disaggregated_params"]["disagg_request_id"] < 2**63


async def test_answer_ended_by_its_first_token_is_not_sent_to_decode() -> None:
    async with scripted_trtllm() as scripted, serving(scripted) as engine:
        scripted.answers.append(ENDED)
        chunk = await prefilled(engine, CHAT)
        chunks = await read(engine, decode(CHAT, chunk))
        assert len(scripted.calls) == 1
        assert chunks[-1].finish is FinishReason.STOP
        assert b"".join(chunk.raw for chunk in chunks).endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("stream", [True, False])
async def test_call_refused_by_the_decode_engine_reports_kv_lost(stream: bool) -> None:
    refusal = ScriptedAnswer.error(400, "trtllm-1.3.0-error-field.json")
    async with scripted_trtllm() as scripted, serving(scripted) as engine:
        scripted.answers.extend((CONTEXT, refusal))
        body = {**CALL, "stream": stream}
        (chunk,) = await read(engine, decode(body, await prefilled(engine, body)))
        assert (chunk.finish, chunk.kv_lost) == (FinishReason.ERROR, KvLoss.BROKEN)


async def test_prefill_without_disaggregated_params_gives_no_transfer_params() -> None:
    reported = json.loads(CONTEXT.pieces[0])
    reported["choices"][0]["disaggregated_params"] = None
    async with scripted_trtllm() as scripted, serving(scripted) as engine:
        scripted.answers.append(ScriptedAnswer((json.dumps(reported).encode(),), content_type=JSON))
        assert (await prefilled(engine, CALL)).kv_transfer_params is None
        scripted.answers.append(ScriptedAnswer((b"{}",), content_type=JSON))
        with pytest.raises(StreamBroken):
            await prefilled(engine, CALL)


async def test_attached_engine_reports_its_load_and_a_partial_cache() -> None:
    states: list[EngineState] = []
    heard, loads = EventRecorder(), list[LoadReport]()
    polls = [native(0, created()), native(1, stored((1, list(range(32)))))]
    async with scripted_trtllm(polls) as scripted:
        attached = await attach(asked_for(scripted))
        assert isinstance(attached.engine, WatchedEngine)
        attached.engine.watch(states.append)
        await attached.engine.start(heard.on_events, loads.append)
        try:
            await until(lambda: bool(loads) and scripted.n_polls >= 2)
            assert (loads[0].active_blocks, states) == (3, [])
            scripted.events.append([native(5, created())])
            await until(lambda: any(not state.knows_cache for state in states))
        finally:
            await attached.engine.stop()


async def test_fleet_file_gives_the_sizes_that_its_engine_does_not() -> None:
    async with scripted_trtllm([native(0, created())]) as scripted:
        scripted.set_json("/metrics", [])
        del scripted.pages["/prometheus/metrics"]
        fleet = load_fleet(
            parse_document(
                "version: 1\nmodels: [{name: tiny, tokenizer: mock, block_size: 64, context_length: 1024}]\n"
                f"workers: [{{name: a, engine: {{kind: trtllm, url: '{scripted.url}'}}}}]\n",
                "fleet.yaml",
            )
        ).fleet
        settings = Settings(frontend=FrontendSettings(http_port=0))
        async with embedded(settings, fleet) as system:
            (model,) = system.service.models()
            assert [(card.block_size, card.context_length) for card in model.fleet] == [(64, 1024)]

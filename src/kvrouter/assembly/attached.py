"""Engines that run already: asked what they are, checked against what was said of them, and attached."""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from kvrouter.core.errors import ConfigError
from kvrouter.core.ids import DpRank, WorkerId
from kvrouter.engines.customs.listener import EventsAt
from kvrouter.engines.openai.server import EngineServer
from kvrouter.engines.port import Engine
from kvrouter.engines.vllm.engine import VllmEngine
from kvrouter.engines.vllm.facts import VllmFacts, ask_facts, events_at
from kvrouter.planes.requests.port import WorkerUnreachable
from kvrouter.telemetry import Event, log_event

logger = logging.getLogger("kvrouter.worker")

ASK_AGAIN_S = 2.0
"""How long after an engine did not answer it is asked again."""

SAID_EACH_S = 30.0
"""How often a log line tells that the engine is still waited for."""


class EngineKind(StrEnum):
    """Engines that can be attached."""

    VLLM = "vllm"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAt:
    """An engine's server, and what its operator says of it: None where the engine is to be asked."""

    kind: EngineKind
    url: str
    model: str | None = None
    block_size: int | None = None
    kv_events: str | None = None
    kv_events_replay: str | None = None
    publishes_kv_events: bool = True
    api_key: str | None = None
    wait_s: float = 600.0
    """How long the engine may take to answer at all: a model is loaded in minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attached:
    """An engine that answered, and what its worker's card says of it."""

    engine: Engine
    model: str
    version: str
    root: str
    context_length: int
    block_size: int
    total_kv_blocks: int
    dp_size: int
    publishes_kv_events: bool
    warnings: tuple[str, ...]


async def attach(at: EngineAt, worker_id: WorkerId) -> Attached:
    """Ask the engine until it answers, and attach it.

    Raises ConfigError that names the flag for what contradicts what the engine says, and for an engine that
    does not answer in time.
    """
    server = EngineServer(at.url, api_key=at.api_key)
    await server.open()
    try:
        facts = await _facts(server, at, worker_id)
        return _attached_vllm(server, facts, at, worker_id)
    except BaseException:
        await server.close()
        raise


async def _facts(server: EngineServer, at: EngineAt, worker_id: WorkerId) -> VllmFacts:
    loop = asyncio.get_running_loop()
    until_s = loop.time() + at.wait_s
    said_s = loop.time() - SAID_EACH_S
    while True:
        try:
            return await ask_facts(server)
        except WorkerUnreachable as error:
            if loop.time() >= until_s:
                raise ConfigError(
                    f"--url: no engine answered within {at.wait_s:g} s: {error.message}", param="url"
                ) from error
            if loop.time() - said_s >= SAID_EACH_S:
                said_s = loop.time()
                log_event(logger, Event.ENGINE_AWAITED, worker=str(worker_id), reason=error.message)
        await asyncio.sleep(ASK_AGAIN_S)


def _attached_vllm(server: EngineServer, facts: VllmFacts, at: EngineAt, worker_id: WorkerId) -> Attached:
    model = at.model or facts.models[0]
    if model not in facts.models:
        raise ConfigError(
            f"--model: the engine serves {', '.join(facts.models)}, not {model!r}: give one of these, "
            f"or start the engine with --served-model-name {model}",
            param="model",
        )
    if at.block_size is not None and at.block_size != facts.block_size:
        raise ConfigError(
            f"--block-size: the engine's blocks have {facts.block_size} tokens, not {at.block_size}: "
            f"leave the flag out, or start the engine with --block-size {at.block_size}",
            param="block_size",
        )
    events, warnings = _events(facts, at)
    return Attached(
        engine=VllmEngine(server, facts, worker_id=worker_id, model=model, events=events),
        model=model,
        version=f"vllm {facts.version}",
        root=facts.root,
        context_length=facts.context_length,
        block_size=facts.block_size,
        total_kv_blocks=min(rank.total_blocks for rank in facts.ranks.values()),
        dp_size=len(facts.ranks),
        publishes_kv_events=bool(events),
        warnings=warnings,
    )


def _events(facts: VllmFacts, at: EngineAt) -> tuple[Mapping[DpRank, EventsAt], tuple[str, ...]]:
    if not at.publishes_kv_events:
        return {}, ()
    warnings = (
        []
        if facts.prefix_caching
        else [f"the engine at {at.url} keeps no prefix cache: start it with --enable-prefix-caching"]
    )
    events = dict(facts.events)
    if at.kv_events is not None:
        topic = next(iter(events.values())).topic if events else ""
        events = events_at(at.kv_events, at.kv_events_replay, len(facts.ranks), topic=topic)
    if not events:
        warnings.append(
            f"the engine at {at.url} publishes no KV events: start it with --kv-events-config, name them by "
            "--kv-events, or say --no-kv-events here"
        )
    elif any(each.replay is None for each in events.values()):
        warnings.append(
            "the engine has no replay_endpoint in its --kv-events-config: KV events that are missed are lost "
            "for good, those before this worker began included"
        )
    return events, tuple(warnings)

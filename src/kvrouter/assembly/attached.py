"""Engines that run already: asked what they are, checked against what was said of them, and attached."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from kvrouter.assembly.attach_sglang import attach_sglang
from kvrouter.assembly.attach_trtllm import attach_trtllm
from kvrouter.assembly.attach_vllm import attach_vllm
from kvrouter.assembly.attach_words import Attached, EngineAt, EngineKind
from kvrouter.config.sources import ENGINE_KEY_VARIABLE
from kvrouter.core.errors import ConfigError
from kvrouter.core.ids import WorkerId
from kvrouter.engines.openai.server import EngineServer, KeyRefused
from kvrouter.engines.sglang.facts import ask_facts as ask_sglang
from kvrouter.engines.trtllm.facts import ask_facts as ask_trtllm
from kvrouter.engines.vllm.facts import ask_facts as ask_vllm
from kvrouter.planes.requests.port import WorkerUnreachable
from kvrouter.telemetry import Event, log_event

logger = logging.getLogger("kvrouter.worker")

Facts = TypeVar("Facts")

ASK_AGAIN_S = 2.0
"""How long after an engine did not answer it is asked again."""

SAID_EACH_S = 30.0
"""How often a log line tells that the engine is still waited for."""


AwaitedSink = Callable[[str], None]
"""Hears, each time that an engine did not answer, why."""


def _nobody(_: str) -> None:
    """Waiting concerns nobody but the log."""


async def attach(at: EngineAt, worker_id: WorkerId, *, on_awaited: AwaitedSink = _nobody) -> Attached:
    """Ask the engine until it answers, and attach it.

    Raises ConfigError whose ``param`` is the field that contradicts what the engine says, and for an engine
    that does not answer in time.
    """
    server = EngineServer(at.url, api_key=at.api_key)

    async def asked(ask: Callable[[EngineServer], Awaitable[Facts]]) -> Facts:
        return await _asked(ask, server, at, worker_id, on_awaited)

    await server.open()
    try:
        match at.kind:
            case EngineKind.VLLM:
                return attach_vllm(server, await asked(ask_vllm), at, worker_id)
            case EngineKind.SGLANG:
                return attach_sglang(server, await asked(ask_sglang), at, worker_id)
            case EngineKind.TRTLLM:
                return attach_trtllm(server, await asked(ask_trtllm), at, worker_id)
    except BaseException:
        await server.close()
        raise


def tell(worker_logger: logging.Logger, worker_id: WorkerId, at: EngineAt, attached: Attached) -> None:
    """Log which engine the worker stands beside, what it said of itself, and the warnings."""
    worker = str(worker_id)
    log_event(
        worker_logger,
        Event.ENGINE_ATTACHED,
        worker=worker,
        url=at.url,
        version=attached.version,
        model=attached.model,
        block_size=attached.block_size,
        context_length=attached.context_length,
        dp_size=attached.dp_size,
        total_kv_blocks=attached.total_kv_blocks,
        publishes_kv_events=attached.publishes_kv_events,
    )
    for warning in attached.warnings:
        log_event(worker_logger, Event.CONFIG_WARNING, worker=worker, detail=warning)


async def _asked(
    ask: Callable[[EngineServer], Awaitable[Facts]],
    server: EngineServer,
    at: EngineAt,
    worker_id: WorkerId,
    on_awaited: AwaitedSink,
) -> Facts:
    loop = asyncio.get_running_loop()
    until_s = loop.time() + at.wait_s
    said_s = loop.time() - SAID_EACH_S
    while True:
        try:
            return await ask(server)
        except KeyRefused as error:
            raise ConfigError(
                f"{error.message}: give its key in {ENGINE_KEY_VARIABLE}", param="url"
            ) from error
        except WorkerUnreachable as error:
            if loop.time() >= until_s:
                raise ConfigError(
                    f"no engine answered within {at.wait_s:g} s: {error.message}", param="url"
                ) from error
            on_awaited(error.message)
            if loop.time() - said_s >= SAID_EACH_S:
                said_s = loop.time()
                log_event(logger, Event.ENGINE_AWAITED, worker=str(worker_id), reason=error.message)
        await asyncio.sleep(ASK_AGAIN_S)

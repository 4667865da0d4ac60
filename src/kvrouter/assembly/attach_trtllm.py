"""A TensorRT-LLM server, attached."""

from kvrouter.assembly.attach_words import (
    Attached,
    EngineAt,
    check_block_size,
    check_model,
    context_length_of,
    events_of,
)
from kvrouter.core.errors import ConfigError
from kvrouter.core.ids import WorkerId
from kvrouter.core.workers import Role
from kvrouter.engines.customs.telling import Telling
from kvrouter.engines.openai.engine import ServedEngine, Told
from kvrouter.engines.openai.server import EngineServer
from kvrouter.engines.trtllm.events import decode
from kvrouter.engines.trtllm.facts import ANSWERS_AT_ONCE, TrtllmFacts
from kvrouter.engines.trtllm.polled import Polled
from kvrouter.engines.trtllm.ways import TrtllmWays


def attach_trtllm(server: EngineServer, facts: TrtllmFacts, at: EngineAt, worker_id: WorkerId) -> Attached:
    """Return the engine behind ``server``. Raises ConfigError with the field of a
    contradiction, or of what the engine does not tell.
    """
    model = check_model(at, (facts.model,), "from a folder named {model}")
    block_size = _block_size(at, facts)
    told, warnings = _told(server, at, block_size)
    if not facts.is_from(ANSWERS_AT_ONCE):
        warnings += (
            f"the engine at {at.url} is TensorRT-LLM {facts.version}: before 1.2 it does not tell its load "
            "while it is busy, so it is not asked, and its KV events come late",
        )
    elif facts.total_blocks is None:
        warnings += (
            f"the engine at {at.url} has not told its load, nor how many KV blocks it has: it does so only "
            "with enable_iter_perf_stats: true",
        )
    ways = TrtllmWays(worker_id, facts, block_size=block_size, fetches_kv=at.role is Role.DECODE)
    return Attached(
        engine=ServedEngine(server, ways, told),
        version=f"tensorrt_llm {facts.version}",
        model=model,
        tokenizer=facts.model,
        context_length=_context_length(at, facts),
        block_size=block_size,
        total_kv_blocks=facts.total_blocks,
        dp_size=1,
        publishes_kv_events=at.publishes_kv_events,
        warnings=warnings,
    )


def _block_size(at: EngineAt, facts: TrtllmFacts) -> int:
    if facts.block_size is not None:
        check_block_size(at, facts.block_size, "kv_cache_config.tokens_per_block")
        return facts.block_size
    if at.block_size is None:
        raise ConfigError(
            f"the engine at {at.url} does not tell it: give its "
            "kv_cache_config.tokens_per_block, which is 32 where it is not set, or start it with "
            "enable_iter_perf_stats: true",
            param="block_size",
        )
    return at.block_size


def _context_length(at: EngineAt, facts: TrtllmFacts) -> int:
    if facts.context_length is not None:
        return context_length_of(at, facts.context_length, "--max_seq_len")
    if at.context_length is None:
        raise ConfigError(
            f"the engine at {at.url} does not tell it: give its --max_seq_len, or the "
            "model's own where that is not set",
            param="context_length",
        )
    return at.context_length


def _told(server: EngineServer, at: EngineAt, block_size: int) -> tuple[Telling, tuple[str, ...]]:
    """Its server is asked for the events, or else somebody publishes them where the operator says."""
    if at.publishes_kv_events and at.kv_events is None:
        return Polled(server, block_size), ()
    events, warnings = events_of(at, {}, 1)
    return Told(events, decode, block_size), warnings

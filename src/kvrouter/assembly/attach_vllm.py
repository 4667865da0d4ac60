"""A vLLM server, attached."""

from kvrouter.assembly.attach_words import (
    Attached,
    EngineAt,
    check_block_size,
    check_model,
    context_length_of,
    events_of,
)
from kvrouter.core.ids import WorkerId
from kvrouter.core.workers import Role
from kvrouter.engines.openai.engine import ServedEngine, Told
from kvrouter.engines.openai.server import EngineServer
from kvrouter.engines.vllm.events import decode
from kvrouter.engines.vllm.facts import VllmFacts
from kvrouter.engines.vllm.ways import VllmWays


def attach_vllm(server: EngineServer, facts: VllmFacts, at: EngineAt, worker_id: WorkerId) -> Attached:
    """Return the engine behind ``server``. Raises ConfigError with the field of a contradiction."""
    model = check_model(at, facts.models)
    check_block_size(at, facts.block_size, "--block-size")
    events, warnings = events_of(at, facts.events, len(facts.ranks))
    if at.publishes_kv_events and not facts.prefix_caching:
        warnings += (f"the engine at {at.url} keeps no prefix cache: start it with --enable-prefix-caching",)
    if at.role is Role.PREFILL and not facts.uses_nixl:
        warnings += (
            f"the engine at {at.url} has no NixlConnector: unless decode engines find its KV by themselves, "
            "as in storage that they share, each prompt is computed twice",
        )
    return Attached(
        engine=ServedEngine(
            server,
            VllmWays(worker_id, facts, model=model),
            Told(events, decode, facts.block_size),
            started=facts.started_s,
        ),
        version=f"vllm {facts.version}",
        model=model,
        tokenizer=facts.root,
        context_length=context_length_of(at, facts.context_length, "--max-model-len"),
        block_size=facts.block_size,
        total_kv_blocks=min(rank.total_blocks for rank in facts.ranks.values()),
        dp_size=len(facts.ranks),
        dp_start=min(facts.ranks),
        publishes_kv_events=bool(events),
        warnings=warnings,
        names={
            **{name: None for name in facts.models if name != model},
            **{adapter: adapter for adapter in facts.adapters},
        },
    )

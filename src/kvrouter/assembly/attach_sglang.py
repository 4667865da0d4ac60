"""An SGLang server, attached."""

from urllib.parse import urlsplit

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
from kvrouter.engines.openai.engine import ServedEngine, Told
from kvrouter.engines.openai.server import EngineServer
from kvrouter.engines.sglang.events import decode
from kvrouter.engines.sglang.facts import SglangFacts
from kvrouter.engines.sglang.ways import SglangWays


def attach_sglang(server: EngineServer, facts: SglangFacts, at: EngineAt, worker_id: WorkerId) -> Attached:
    """Return the engine behind ``server``. Raises ConfigError with the field of a contradiction."""
    model = check_model(at, (facts.model,))
    check_block_size(at, facts.block_size, "--page-size")
    if at.role is not facts.role:
        mode = {Role.BOTH: "null", Role.PREFILL: "prefill", Role.DECODE: "decode"}[at.role]
        raise ConfigError(
            f"the engine's mode of disaggregation makes it {facts.role}, not {at.role}: give that "
            f"role, or start the engine with --disaggregation-mode {mode}",
            param="role",
        )
    events, warnings = events_of(at, facts.events, facts.dp_size)
    if at.publishes_kv_events and not facts.prefix_caching:
        warnings += (f"the engine at {at.url} keeps no prefix cache: it has --disable-radix-cache",)
    if not facts.tells_cached_tokens:
        warnings += (
            f"the engine at {at.url} does not tell cached tokens, so nobody can see whether the index is "
            "right: start it with --enable-cache-report",
        )
    meets = at.role is Role.PREFILL and facts.bootstrap_port is not None
    return Attached(
        engine=ServedEngine(
            server,
            SglangWays(worker_id, facts),
            Told(events, decode, facts.block_size),
            started=facts.started,
        ),
        version=f"sglang {facts.version}",
        model=model,
        tokenizer=facts.tokenizer,
        context_length=context_length_of(at, facts.context_length, "--context-length"),
        block_size=facts.block_size,
        total_kv_blocks=facts.total_blocks,
        dp_size=facts.dp_size,
        publishes_kv_events=bool(events),
        warnings=warnings,
        bootstrap=(urlsplit(at.url).hostname or "", facts.bootstrap_port or 0) if meets else None,
    )

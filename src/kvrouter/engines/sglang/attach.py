"""Attaches an SGLang server: its HTTP client and its KV events.

Hashes are signed. Every store names its salt, and the adapter by its public name. A model that keys its cache
by each token and the next one publishes pairs; the ids that stand for images are already in ``token_ids``.
"""

from urllib.parse import urlsplit

from kvrouter.core.errors import ConfigError
from kvrouter.core.ids import WorkerId
from kvrouter.core.requests import EngineRequest
from kvrouter.core.workers import BLOCK_SIZE_UNKNOWN, Role
from kvrouter.engines.attach import (
    Attached,
    AttachSpec,
    block_size_of,
    check_identity,
    check_model,
    context_length_of,
    events_of,
)
from kvrouter.engines.kv_events.batches import (
    CLEARED,
    REMOVED,
    EventShape,
    EventShapes,
    Name,
    StoredFields,
    read_batch,
    stored_word,
)
from kvrouter.engines.kv_events.records import EngineBatch, EngineEvent
from kvrouter.engines.openai.engine import EngineCall, Probe, ServedEngine, ZmqEvents
from kvrouter.engines.openai.server import EngineServer, attach_server
from kvrouter.engines.sglang.calls import call_of
from kvrouter.engines.sglang.introspect import SglangInfo, ask_info, ask_loads
from kvrouter.transports.requests.port import EngineFailed, WorkerUnreachable


class SglangClient:
    """A start takes this engine longer than a probe, so only after a failed probe is it asked which one
    this is: that page is long.
    """

    def __init__(self, worker_id: WorkerId, facts: SglangInfo) -> None:
        self._worker_id = worker_id
        self._facts = facts
        self._started: str | None = facts.started

    def call_of(self, request: EngineRequest) -> EngineCall:
        """Return how SGLang is asked for a leg. Raises EngineFailed for one without a meeting place in a mode
        of disaggregation: SGLang would refuse it as the client's mistake.
        """
        if self._facts.role is not Role.BOTH and request.bootstrap is None:
            mode = self._facts.role.value
            raise EngineFailed(f"SGLang in {mode} mode takes no request without the other half of a pair")
        return call_of(request, n_ranks=self._facts.dp_size, tells_usage=self._facts.tells_usage)

    async def look(self, server: EngineServer) -> Probe:
        """Ask for its loads."""
        try:
            facts = self._facts
            loads = await ask_loads(server, self._worker_id, facts.block_size, model=facts.model)
            if self._started is None:
                now = await ask_info(server, model=facts.model, role=facts.role, dp_size=facts.dp_size)
                check_identity(server.url, now.identity, self._facts.identity)
                self._started = now.started
        except WorkerUnreachable:
            self._started = None
            raise
        return Probe(loads, self._started)


class _Stored(StoredFields):
    cache_salt: Name | None = None
    session_id: Name | None = None
    lora_name: Name | None = None


class _StoredArray(_Stored, array_like=True, tag="BlockStored"):
    pass


class _StoredMap(_Stored, tag_field="type", tag="BlockStored"):
    pass


def decode(payload: bytes) -> tuple[EngineBatch, ...]:
    """Decode what one SGLang scheduler published at once. Raises ProtocolError, which names the field."""
    return (read_batch(payload, _SHAPES),)


def _stored(wire: _Stored, where: str) -> EngineEvent:
    return stored_word(wire, where, lora_name=wire.lora_name, cache_salt=wire.cache_salt)


_SHAPES: EventShapes = {
    "BlockStored": EventShape(as_map=_StoredMap, as_array=_StoredArray, word=_stored),
    "BlockRemoved": REMOVED,
    "AllBlocksCleared": CLEARED,
}


async def attach(spec: AttachSpec) -> Attached:
    """An :data:`~kvrouter.engines.attach.AttachEngine`."""
    return await attach_server(spec, _attach)


async def _attach(server: EngineServer, spec: AttachSpec) -> Attached:
    facts = await ask_info(server, model=spec.model, role=spec.role, dp_size=spec.dp_size or 1)
    model = check_model(spec, (facts.model,))
    block_size = block_size_of(spec, facts.block_size, "--page-size")
    if spec.role is not facts.role:
        mode = {Role.BOTH: "null", Role.PREFILL: "prefill", Role.DECODE: "decode"}[spec.role]
        raise ConfigError(
            f"the engine's mode of disaggregation makes it {facts.role}, not {spec.role}: give that "
            f"role, or start the engine with --disaggregation-mode {mode}",
            param="role",
        )
    events, warnings = events_of(spec, facts.events, facts.dp_size)
    warnings = facts.missing + warnings
    if block_size is None:
        events = {}
    if spec.publishes_kv_events and not facts.prefix_caching:
        warnings += (f"the engine at {spec.url} keeps no prefix cache: it has --disable-radix-cache",)
    if not facts.tells_cached_tokens:
        warnings += (
            f"the engine at {spec.url} does not tell cached tokens, so nobody can see whether the index is "
            "right: start it with --enable-cache-report",
        )
    meets = spec.role is Role.PREFILL and facts.bootstrap_port is not None
    return Attached(
        engine=ServedEngine(
            server,
            SglangClient(spec.worker_id, facts),
            ZmqEvents(events, decode, block_size or BLOCK_SIZE_UNKNOWN),
            started=facts.started,
        ),
        version=f"sglang {facts.version}".rstrip(),
        model=model,
        tokenizer=facts.tokenizer,
        context_length=context_length_of(spec, facts.context_length, "--context-length"),
        block_size=block_size,
        total_kv_blocks=facts.total_blocks,
        dp_size=facts.dp_size,
        publishes_kv_events=bool(events),
        warnings=warnings,
        identity=facts.identity,
        bootstrap=(urlsplit(spec.url).hostname or "", facts.bootstrap_port or 0) if meets else None,
        decode_only=spec.role is Role.DECODE,
        ends_after_transfer=spec.role is Role.PREFILL,
    )

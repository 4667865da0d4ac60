"""Attaches an SGLang server: its HTTP client and its KV events.

Hashes are signed. Every store names its salt, and the adapter by its public name. A model that keys its cache
by each token and the next one publishes pairs; the ids of images are already in ``token_ids``.
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
    stored_event,
)
from kvrouter.engines.kv_events.engine_events import EngineBatch, EngineEvent
from kvrouter.engines.openai.engine import EngineCall, Probe, ServedEngine, ZmqEvents
from kvrouter.engines.openai.server import EngineServer, attach_server
from kvrouter.engines.sglang.calls import call_of
from kvrouter.engines.sglang.introspect import SglangInfo, ask_info, ask_loads, start_on
from kvrouter.transports.requests.port import EngineFailed, WorkerUnreachable


class SglangClient:
    """Calls and probes of one SGLang server. The page that tells its start is long, and a start takes longer
    than a probe: a probe asks for it only after one that failed, and tells no start otherwise.
    """

    def __init__(self, worker_id: WorkerId, info: SglangInfo) -> None:
        self._worker_id = worker_id
        self._info = info
        self._is_restart_possible = False

    def call_of(self, request: EngineRequest) -> EngineCall:
        """Return the call to SGLang for a leg. Raises EngineFailed for a leg without bootstrap values in a
        mode of disaggregation: SGLang would refuse it as the client's mistake.
        """
        if self._info.role is not Role.BOTH and request.bootstrap is None:
            mode = self._info.role.value
            raise EngineFailed(f"SGLang in {mode} mode takes no request without the other half of a pair")
        return call_of(request, n_ranks=self._info.dp_size, tells_usage=self._info.tells_usage)

    async def look(self, server: EngineServer) -> Probe:
        """Ask for its loads, and after a failed probe also for its start."""
        started = None
        try:
            info = self._info
            loads = await ask_loads(server, self._worker_id, info.block_size, model=info.model)
            if self._is_restart_possible:
                now = await ask_info(server, model=info.model, role=info.role, dp_size=info.dp_size)
                check_identity(server.url, now.identity, self._info.identity)
                started = now.started
                self._is_restart_possible = False
        except WorkerUnreachable:
            self._is_restart_possible = True
            raise
        return Probe(loads, started)


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


def _stored(fields: _Stored, where: str) -> EngineEvent:
    return stored_event(fields, where, lora_name=fields.lora_name, cache_salt=fields.cache_salt)


_SHAPES: EventShapes = {
    "BlockStored": EventShape(as_map=_StoredMap, as_array=_StoredArray, convert=_stored),
    "BlockRemoved": REMOVED,
    "AllBlocksCleared": CLEARED,
}


async def ask_start(server: EngineServer) -> str | None:
    """An :data:`~kvrouter.engines.openai.engine.AskStart`: how long this start took in its parts."""
    page = await server.look("/server_info", on_new_connection=True)
    return None if page is None else start_on(page, f"{server.url}/server_info")


async def attach(spec: AttachSpec) -> Attached:
    """An :data:`~kvrouter.engines.attach.AttachEngine`."""
    return await attach_server(spec, _attach)


async def _attach(server: EngineServer, spec: AttachSpec) -> Attached:
    info = await ask_info(server, model=spec.model, role=spec.role, dp_size=spec.dp_size or 1)
    model = check_model(spec, (info.model,))
    block_size = block_size_of(spec, info.block_size, "--page-size")
    if spec.role is not info.role:
        mode = {Role.BOTH: "null", Role.PREFILL: "prefill", Role.DECODE: "decode"}[spec.role]
        raise ConfigError(
            f"the engine's mode of disaggregation makes it {info.role}, not {spec.role}: give that "
            f"role, or start the engine with --disaggregation-mode {mode}",
            param="role",
        )
    events, warnings = events_of(spec, info.events, info.dp_size)
    warnings = info.missing + warnings
    if block_size is None:
        events = {}
    if spec.publishes_kv_events and not info.prefix_caching:
        warnings += (f"the engine at {spec.url} keeps no prefix cache: it has --disable-radix-cache",)
    if not info.tells_cached_tokens:
        warnings += (
            f"the engine at {spec.url} does not tell cached tokens, so nobody can see whether the index is "
            "right: start it with --enable-cache-report",
        )
    meets = spec.role is Role.PREFILL and info.bootstrap_port is not None
    return Attached(
        engine=ServedEngine(
            server,
            SglangClient(spec.worker_id, info),
            ZmqEvents(events, decode, block_size or BLOCK_SIZE_UNKNOWN),
            started=info.started,
            ask_start=ask_start,
        ),
        version=f"sglang {info.version}".rstrip(),
        model=model,
        tokenizer=info.tokenizer,
        context_length=context_length_of(spec, info.context_length, "--context-length"),
        block_size=block_size,
        total_kv_blocks=info.total_blocks,
        dp_size=info.dp_size,
        publishes_kv_events=bool(events),
        warnings=warnings,
        start=info.started or "",
        identity=info.identity,
        kv_format=info.kv_format,
        bootstrap=(urlsplit(spec.url).hostname or "", info.bootstrap_port or 0) if meets else None,
        decode_only=spec.role is Role.DECODE,
        ends_after_transfer=spec.role is Role.PREFILL,
    )

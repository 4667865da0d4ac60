"""Attaches a TensorRT-LLM server: its HTTP client and its KV events."""

from kvrouter.core.errors import ProtocolError
from kvrouter.core.ids import DpRank, WorkerId, WorkerRank
from kvrouter.core.requests import EngineRequest
from kvrouter.core.workers import BLOCK_SIZE_UNKNOWN, KvTransfers, LoadReport, Role
from kvrouter.engines.attach import (
    Attached,
    AttachSpec,
    block_size_of,
    check_identity,
    check_model,
    context_length_of,
    events_of,
)
from kvrouter.engines.kv_events.listener import EngineEventSource
from kvrouter.engines.openai.engine import EngineCall, Probe, ServedEngine, ZmqEvents
from kvrouter.engines.openai.pages import check_serves
from kvrouter.engines.openai.server import EngineServer, attach_server
from kvrouter.engines.trtllm.calls import call_of
from kvrouter.engines.trtllm.events import decode
from kvrouter.engines.trtllm.introspect import (
    ANSWERS_AT_ONCE,
    HEALTH,
    OWNER,
    SHARED_IDS,
    TrtllmInfo,
    ask_fetched,
    ask_info,
    ask_iteration,
)
from kvrouter.engines.trtllm.polled import Polled
from kvrouter.transports.requests.port import WorkerUnreachable

IDLE_AFTER_PROBES = 2
"""After this many probes without a running request the engine counts as idle: one iteration may take long."""


RANK = DpRank(0)
"""Its server cannot be asked for one of several ranks: the router sees them as one."""


class TrtllmClient:
    """``block_size`` is that of its worker's card; with ``fetches_kv`` it is asked for its fetched KV. It
    cannot distinguish two starts; the engine's events do. After a failed probe it is asked for its model's
    name again.
    """

    def __init__(
        self, worker_id: WorkerId, info: TrtllmInfo, *, block_size: int | None, fetches_kv: bool = False
    ) -> None:
        self._rank = WorkerRank(worker_id, RANK)
        self._info = info
        self._block_size = block_size
        self._has_shared_ids = info.is_from(SHARED_IDS)
        self._reports_load = info.is_from(ANSWERS_AT_ONCE)
        self._fetches_kv = fetches_kv
        self._fetched: KvTransfers | None = None
        self._last: LoadReport | None = None
        self._probes_without = 0
        self._is_known = True

    def call_of(self, request: EngineRequest) -> EngineCall:
        """Return how TensorRT-LLM is asked for a leg."""
        return call_of(request, has_shared_ids=self._has_shared_ids)

    async def look(self, server: EngineServer) -> Probe:
        """Ask whether it is well, and for its load."""
        try:
            if await server.look(HEALTH) is None or not self._is_known:
                await check_serves(server, self._info.model, owner=OWNER)
                self._is_known = True
        except WorkerUnreachable:
            self._is_known = False
            raise
        return Probe(await self._loads(server) if self._reports_load else ())

    async def _loads(self, server: EngineServer) -> tuple[LoadReport, ...]:
        try:
            if self._fetches_kv:
                self._fetched = await ask_fetched(server, self._fetched)
            iteration = await ask_iteration(server)
        except (WorkerUnreachable, ProtocolError):
            return ()  # it is well, and too busy to answer, or says nothing that can be read
        if iteration is None or iteration.kv_cache_stats is None:
            return self._loads_without()
        cache = iteration.kv_cache_stats
        if self._block_size is not None:
            check_identity(
                server.url, {"block size": cache.tokens_per_block}, {"block size": self._block_size}
            )
        self._probes_without = 0
        self._last = LoadReport(
            rank=self._rank,
            active_blocks=cache.used_num_blocks,
            total_blocks=cache.max_num_blocks,
            running_requests=iteration.num_active_requests,
            waiting_requests=iteration.num_queued_requests,
            kv_transfers=self._fetched,
        )
        return (self._last,)

    def _loads_without(self) -> tuple[LoadReport, ...]:
        """Return empty loads: an engine without requests reports none."""
        self._probes_without += 1
        if self._last is None or self._probes_without < IDLE_AFTER_PROBES:
            return ()
        return (LoadReport(self._rank, 0, self._last.total_blocks, kv_transfers=self._fetched),)


async def attach(spec: AttachSpec) -> Attached:
    """An :data:`~kvrouter.engines.attach.AttachEngine`; an error may also be about an unreported value."""
    return await attach_server(spec, _attach)


async def _attach(server: EngineServer, spec: AttachSpec) -> Attached:
    info = await ask_info(server, model=spec.model)
    model = check_model(spec, (info.model,), "from a folder named {model}")
    block_size = block_size_of(spec, info.block_size, "kv_cache_config.tokens_per_block")
    context_length = context_length_of(spec, info.context_length, "--max_seq_len")
    event_source, warnings = _event_source(server, spec, block_size)
    warnings = info.missing + warnings
    if block_size is None:
        warnings += (
            f"the engine at {spec.url} does not tell its block size, so its KV events cannot be used: give "
            "its kv_cache_config.tokens_per_block as block_size (--block-size), which is 32 where it is not "
            "set, or start it with enable_iter_perf_stats: true",
        )
    if context_length is None:
        warnings += (
            f"the engine at {spec.url} does not tell the length of its context, so no call is kept from it "
            "for its length: give its --max_seq_len as context_length (--context-length)",
        )
    if not info.is_from(ANSWERS_AT_ONCE):
        warnings += (
            f"the engine at {spec.url} is TensorRT-LLM {info.version}: before 1.2 it does not tell its load "
            "while it is busy, so it is not asked, and its KV events come late",
        )
    elif info.total_blocks is None:
        warnings += (
            f"the engine at {spec.url} has not reported its load, nor how many KV blocks it has: it does so "
            "only with enable_iter_perf_stats: true",
        )
    client = TrtllmClient(spec.worker_id, info, block_size=block_size, fetches_kv=spec.role is Role.DECODE)
    return Attached(
        engine=ServedEngine(server, client, event_source),
        version=f"tensorrt_llm {info.version}".rstrip(),
        model=model,
        tokenizer=info.model,
        context_length=context_length,
        block_size=block_size,
        total_kv_blocks=info.total_blocks,
        dp_size=1,
        publishes_kv_events=spec.publishes_kv_events and block_size is not None,
        warnings=warnings,
    )


def _event_source(
    server: EngineServer, spec: AttachSpec, block_size: int | None
) -> tuple[EngineEventSource, tuple[str, ...]]:
    """Return a source that polls its server, or the publisher that the operator names; and warnings."""
    if block_size is None:
        return ZmqEvents({}, decode, BLOCK_SIZE_UNKNOWN), ()
    if spec.publishes_kv_events and spec.kv_events is None:
        return Polled(server, block_size), ()
    events, warnings = events_of(spec, {}, 1)
    return ZmqEvents(events, decode, block_size), warnings

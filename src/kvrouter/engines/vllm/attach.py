"""Attaches a vLLM server: its HTTP client and its KV events."""

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
    least_known,
)
from kvrouter.engines.openai.engine import REFUSED_PROBES, EngineCall, Probe, ServedEngine, ZmqEvents
from kvrouter.engines.openai.metrics import PAGE_LINES_MAX, PAGE_MAX_BYTES
from kvrouter.engines.openai.pages import EnginePages, check_serves
from kvrouter.engines.openai.server import EngineServer, attach_server
from kvrouter.engines.vllm.calls import ToolsLeftOut, call_of
from kvrouter.engines.vllm.events import decode
from kvrouter.engines.vllm.introspect import (
    LOAD_METRICS,
    STARTED_METRIC,
    VllmInfo,
    ask_info,
    load_reports,
    started_of,
)

_METRICS = (*LOAD_METRICS, STARTED_METRIC)


class VllmClient:
    """``model`` is the engine's own name for what it serves. An engine that was restarted as another one
    does not answer, so far as its worker's card goes.
    """

    def __init__(self, worker_id: WorkerId, facts: VllmInfo, *, model: str) -> None:
        self._worker_id = worker_id
        self._facts = facts
        self._model = model
        self._started_s = facts.started_s
        self._tools_left_out = ToolsLeftOut()

    def call_of(self, request: EngineRequest) -> EngineCall:
        """Return how vLLM is asked for a leg."""
        return call_of(
            request,
            model=self._model,
            n_ranks=len(self._facts.ranks),
            tells_where_kv_waits=self._facts.uses_nixl,
            writes_choices=self._facts.writes_choices,
            tools_left_out=self._tools_left_out,
        )

    async def look(self, server: EngineServer) -> Probe:
        """Read its metrics page; where that cannot be had, ask whether it still serves the model."""
        samples = await EnginePages(server).metrics("/metrics", _METRICS)
        if isinstance(samples, str):
            await check_serves(server, self._model, owner="vllm")
            return Probe(())
        started_s = started_of(samples)
        if started_s is not None and self._started_s not in (None, started_s):
            now = await ask_info(server, model=self._model, dp_size=len(self._facts.ranks))
            check_identity(server.url, now.identity, self._facts.identity)
            self._facts, self._tools_left_out = now, ToolsLeftOut()
        self._started_s = started_s or self._started_s
        return Probe(tuple(load_reports(samples, self._facts.ranks, self._worker_id)), started_s)


async def attach(spec: AttachSpec) -> Attached:
    """An :data:`~kvrouter.engines.attach.AttachEngine`."""
    return await attach_server(spec, _attach)


async def _attach(server: EngineServer, spec: AttachSpec) -> Attached:
    facts = await ask_info(server, model=spec.model, dp_size=spec.dp_size or 1)
    model = check_model(spec, facts.models)
    block_size = block_size_of(spec, facts.block_size, "--block-size")
    events, warnings = events_of(spec, facts.events, len(facts.ranks))
    warnings = facts.missing + warnings
    if block_size is None:
        events = {}
    if spec.publishes_kv_events and facts.prefix_caching is False:
        warnings += (
            f"the engine at {spec.url} keeps no prefix cache: start it with --enable-prefix-caching",
        )
    if server.has_long_metrics:
        warnings += (
            f"the engine at {spec.url} has a longer metrics page than is read: what lies behind "
            f"{PAGE_MAX_BYTES} bytes or {PAGE_LINES_MAX} lines is not known",
        )
    if spec.role is Role.PREFILL and not facts.uses_nixl:
        warnings += (
            f"the engine at {spec.url} has no NixlConnector: unless decode engines find its KV by "
            "themselves, as in storage that they share, each prompt is computed twice",
        )
    return Attached(
        engine=ServedEngine(
            server,
            VllmClient(spec.worker_id, facts, model=model),
            ZmqEvents(events, decode, block_size or BLOCK_SIZE_UNKNOWN),
            started=facts.started_s,
            refused_probes=REFUSED_PROBES,
        ),
        version=f"vllm {facts.version}".rstrip(),
        model=model,
        tokenizer=facts.root,
        context_length=context_length_of(spec, facts.context_length, "--max-model-len"),
        block_size=block_size,
        total_kv_blocks=least_known(rank.total_blocks for rank in facts.ranks.values()),
        dp_size=len(facts.ranks),
        dp_start=min(facts.ranks),
        publishes_kv_events=bool(events),
        warnings=warnings,
        identity=facts.identity,
        names={
            **{name: None for name in facts.models if name != model},
            **{adapter: adapter for adapter in facts.adapters},
        },
    )

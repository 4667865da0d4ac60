"""Attaches a vLLM server: its HTTP client and its KV events."""

from collections import deque

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
from kvrouter.engines.openai.engine_starts import STARTS_KEPT
from kvrouter.engines.openai.metrics import PAGE_LINES_MAX, PAGE_MAX_BYTES, read_metrics
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
    """``model`` is the engine's own name for its model. For its worker's card, an engine that restarted as
    another one does not answer.
    """

    def __init__(self, worker_id: WorkerId, info: VllmInfo, *, model: str, role: Role = Role.BOTH) -> None:
        self._worker_id = worker_id
        self._role = role
        self._info = info
        self._model = model
        known = () if info.started_s is None else (info.started_s,)
        self._known_starts = deque(known, maxlen=STARTS_KEPT)
        """The starts whose values are those of the worker's card."""

        self._tools_left_out = ToolsLeftOut()

    def call_of(self, request: EngineRequest) -> EngineCall:
        """Return how vLLM is asked for a leg."""
        return call_of(
            request,
            model=self._model,
            n_ranks=len(self._info.ranks),
            tells_where_kv_waits=self._info.uses_nixl,
            writes_choices=self._info.writes_choices,
            is_decode=self._role is Role.DECODE,
            tools_left_out=self._tools_left_out,
        )

    async def look(self, server: EngineServer) -> Probe:
        """Read its metrics page; if that fails, ask whether it still serves the model."""
        samples = await EnginePages(server).metrics("/metrics", _METRICS)
        if isinstance(samples, str):
            await check_serves(server, self._model, owner="vllm")
            return Probe(())
        started_s = started_of(samples)
        if started_s is not None and started_s not in self._known_starts:
            if self._known_starts:
                n_ranks = len(self._info.ranks)
                now = await ask_info(server, model=self._model, dp_size=n_ranks, role=self._role)
                check_identity(server.url, now.identity, self._info.identity)
                self._info, self._tools_left_out = now, ToolsLeftOut()
            self._known_starts.append(started_s)
        return Probe(tuple(load_reports(samples, self._info.ranks, self._worker_id)), started_s)


async def ask_start(server: EngineServer) -> float | None:
    """An :data:`~kvrouter.engines.openai.engine.AskStart`: when the process began whose page this is."""
    page = await server.metrics((STARTED_METRIC,), on_new_connection=True)
    return None if page is None else started_of(read_metrics(page, (STARTED_METRIC,)))


async def attach(spec: AttachSpec) -> Attached:
    """An :data:`~kvrouter.engines.attach.AttachEngine`."""
    return await attach_server(spec, _attach)


async def _attach(server: EngineServer, spec: AttachSpec) -> Attached:
    info = await ask_info(server, model=spec.model, dp_size=spec.dp_size or 1, role=spec.role)
    model = check_model(spec, info.models)
    block_size = block_size_of(spec, info.block_size, "--block-size")
    events, warnings = events_of(spec, info.events, len(info.ranks))
    warnings = info.missing + warnings
    if block_size is None:
        events = {}
    if spec.publishes_kv_events and info.prefix_caching is False:
        warnings += (
            f"the engine at {spec.url} keeps no prefix cache: start it with --enable-prefix-caching",
        )
    if server.has_long_metrics:
        warnings += (
            f"the engine at {spec.url} has a longer metrics page than is read: what lies behind "
            f"{PAGE_MAX_BYTES} bytes or {PAGE_LINES_MAX} lines is not known",
        )
    if spec.role is Role.PREFILL and not info.uses_nixl:
        warnings += (
            f"the engine at {spec.url} has no NixlConnector: unless decode engines find its KV by "
            "themselves, as in storage that they share, each prompt is computed twice",
        )
    return Attached(
        engine=ServedEngine(
            server,
            VllmClient(spec.worker_id, info, model=model, role=spec.role),
            ZmqEvents(events, decode, block_size or BLOCK_SIZE_UNKNOWN),
            started=info.started_s,
            ask_start=ask_start,
            refused_probes=REFUSED_PROBES,
        ),
        version=f"vllm {info.version}".rstrip(),
        model=model,
        tokenizer=info.root,
        context_length=context_length_of(spec, info.context_length, "--max-model-len"),
        block_size=block_size,
        total_kv_blocks=least_known(rank.total_blocks for rank in info.ranks.values()),
        dp_size=len(info.ranks),
        dp_start=min(info.ranks),
        publishes_kv_events=bool(events),
        warnings=warnings,
        start="" if info.started_s is None else str(info.started_s),
        bidirectional_kv=info.bidirectional_kv,
        identity=info.identity,
        kv_format=info.kv_format,
        names={
            **{name: None for name in info.models if name != model},
            **{adapter: adapter for adapter in info.adapters},
        },
    )

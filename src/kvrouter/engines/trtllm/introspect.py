"""The values that a TensorRT-LLM server reports: version, model, cache, load."""

import re
from dataclasses import dataclass
from typing import Annotated, TypeVar

import msgspec

from kvrouter.core.errors import ProtocolError
from kvrouter.core.json import decoded
from kvrouter.core.workers import KvTransfers
from kvrouter.engines.openai.pages import EnginePages, count_of, text_of
from kvrouter.engines.openai.server import EngineServer
from kvrouter.transports.requests.port import WorkerUnreachable

T = TypeVar("T")

ITERATIONS = "/metrics"
"""JSON: the statistics of the iterations since the last request."""

REQUESTS = "/perf_metrics"
"""The times of requests that ended since the last request; empty without ``perf_metrics_max_requests``."""

_Bytes = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
_Seconds = Annotated[float, msgspec.Meta(ge=0)]


class CacheStats(msgspec.Struct, frozen=True, rename="camel"):
    """``kvCacheStats``: used are the blocks that running requests hold."""

    tokens_per_block: Annotated[int, msgspec.Meta(ge=1)]
    max_num_blocks: int
    used_num_blocks: int = 0


class Iteration(msgspec.Struct, frozen=True, rename="camel"):
    """The engine's report on one of its iterations."""

    num_active_requests: int = 0
    num_queued_requests: int = 0
    kv_cache_stats: CacheStats | None = None


class _Timing(msgspec.Struct, frozen=True):
    """Seconds are those of one clock of the engine."""

    kv_cache_size: _Bytes = 0
    kv_cache_transfer_start: _Seconds = 0.0
    kv_cache_transfer_end: _Seconds = 0.0


class _Took(msgspec.Struct, frozen=True):
    timing_metrics: _Timing = _Timing()


class _Request(msgspec.Struct, frozen=True):
    perf_metrics: _Took = _Took()


_iterations = msgspec.json.Decoder(tuple[Iteration, ...])
_requests = msgspec.json.Decoder(tuple[_Request, ...])


async def ask_iteration(server: EngineServer) -> Iteration | None:
    """Ask for the last iteration that reported its cache; None without one since the last request.

    Raises WorkerUnreachable or ProtocolError.
    """
    page = await server.look(ITERATIONS)
    iterations = () if page is None else decoded(_iterations, page, ITERATIONS)
    return next((each for each in reversed(iterations) if each.kv_cache_stats is not None), None)


async def ask_fetched(server: EngineServer, before: KvTransfers | None) -> KvTransfers | None:
    """Ask for the fetched KV; return the sum with ``before``, None while no KV was fetched.

    Raises WorkerUnreachable or ProtocolError.
    """
    page = await server.look(REQUESTS)
    requests = () if page is None else decoded(_requests, page, REQUESTS)
    took = [request.perf_metrics.timing_metrics for request in requests]
    fetched = [each for each in took if each.kv_cache_size]
    if not fetched:
        return before
    before = before or KvTransfers(transfers=0, bytes=0, seconds=0.0)
    return KvTransfers(
        transfers=before.transfers + len(fetched),
        bytes=before.bytes + sum(each.kv_cache_size for each in fetched),
        seconds=before.seconds
        + sum(max(0.0, each.kv_cache_transfer_end - each.kv_cache_transfer_start) for each in fetched),
    )


OWNER = "tensorrt_llm"
"""Whom the server names as its model's owner: by that it is known from other engines' servers."""

HEALTH = "/health"
SERVER_INFO = "/server_info"

GENERATE_ONE = "/health_generate"
"""Makes the engine generate one token: before its first request an engine does not report its cache."""

METRICS = "/prometheus/metrics"
"""There with ``return_perf_metrics`` alone."""

CONFIG_METRIC = "trtllm_model_config_info"

ANSWERS_AT_ONCE = (1, 2)
"""Before this version ``/metrics`` is not answered while the engine is busy."""

SHARED_IDS = (1, 3)
"""From this version on both legs of a handoff are given one id, which is unique over all engines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrtllmInfo:
    """The values of one engine; None for unreported ones, which ``missing`` explains in sentences."""

    version: str
    model: str
    context_length: int | None
    block_size: int | None
    total_blocks: int | None
    missing: tuple[str, ...] = ()

    def is_from(self, version: tuple[int, int]) -> bool:
        """Whether it is of ``version`` or later; a version that cannot be read counts as a later one."""
        found = re.match(r"(\d+)\.(\d+)", self.version)
        return found is None or (int(found[1]), int(found[2])) >= version


async def ask_info(server: EngineServer, *, model: str | None = None) -> TrtllmInfo:
    """Ask the engine behind ``server``; one token is generated for the values that only an iteration reports.
    ``model`` stands in for an unreported name.

    Raises WorkerUnreachable while it does not answer, and ConfigError if it is no TensorRT-LLM engine.
    """
    pages = EnginePages(server)
    listed = await pages.models(owner=OWNER, model=model)
    version = text_of((await pages.fields("/version", lost="its version is unknown")).get("version"))
    block_size = count_of((await pages.fields(SERVER_INFO)).get("tokens_per_block"))
    last = await _iteration_of(server)
    if last is None and block_size is None:
        last = await _iteration_of(server, GENERATE_ONE)
    cache = None if last is None else last.kv_cache_stats
    return TrtllmInfo(
        version=version or "",
        model=listed[0].id,
        context_length=await _context_length(pages),
        block_size=block_size if cache is None else cache.tokens_per_block,
        total_blocks=None if cache is None else cache.max_num_blocks,
        missing=pages.missing,
    )


async def _iteration_of(server: EngineServer, path: str | None = None) -> Iteration | None:
    """Ask for the last iteration, after ``path``; None where it cannot be reached."""
    try:
        if path is not None:
            await server.look(path)
        return await ask_iteration(server)
    except (WorkerUnreachable, ProtocolError):
        return None


async def _context_length(pages: EnginePages) -> int | None:
    samples = await pages.metrics(METRICS, (CONFIG_METRIC,))
    found = () if isinstance(samples, str) else samples.get(CONFIG_METRIC, ())
    return next((length for each in found if (length := count_of(each.labels.get("max_model_len")))), None)

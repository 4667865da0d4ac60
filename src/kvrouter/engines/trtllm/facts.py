"""What TensorRT-LLM's server tells of itself; before 1.3 of its cache only when it ran something."""

import re
from dataclasses import dataclass
from typing import Annotated, TypeVar

import msgspec

from kvrouter.core.errors import ConfigError, ProtocolError
from kvrouter.engines.openai.metrics import read_metrics
from kvrouter.engines.openai.server import EngineServer
from kvrouter.planes.requests.port import WorkerUnreachable

T = TypeVar("T")

OWNER = "tensorrt_llm"
"""Whom the server names as its model's owner: by that it is known from other engines' servers."""

HEALTH = "/health"
SERVER_INFO = "/server_info"

ITERATIONS = "/metrics"
"""JSON: the statistics of the iterations that nobody asked for yet."""

GENERATE_ONE = "/health_generate"
"""Makes the engine generate one token: an engine that has run nothing yet tells nothing of its cache."""

METRICS = "/prometheus/metrics"
"""There with ``return_perf_metrics`` alone."""

CONFIG_METRIC = "trtllm_model_config_info"

ANSWERS_AT_ONCE = (1, 2)
"""Before this version ``/metrics`` is not answered while the engine is busy."""

SHARED_IDS = (1, 3)
"""From this version on both legs of a handoff are given one id, which is unique over all engines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrtllmFacts:
    """One engine. What it did not tell is None."""

    version: str
    model: str
    context_length: int | None
    block_size: int | None
    total_blocks: int | None

    def is_from(self, version: tuple[int, int]) -> bool:
        """Whether it is of ``version`` or later; a version that cannot be read counts as a later one."""
        found = re.match(r"(\d+)\.(\d+)", self.version)
        return found is None or (int(found[1]), int(found[2])) >= version


class _Version(msgspec.Struct, frozen=True):
    version: str


class _Model(msgspec.Struct, frozen=True):
    id: str
    owned_by: str = ""


class _Models(msgspec.Struct, frozen=True):
    data: Annotated[tuple[_Model, ...], msgspec.Meta(min_length=1)]


class _ServerInfo(msgspec.Struct, frozen=True):
    tokens_per_block: Annotated[int, msgspec.Meta(ge=1)] | None = None


class CacheStats(msgspec.Struct, frozen=True, rename="camel"):
    """``kvCacheStats``: used are the blocks that running requests hold."""

    tokens_per_block: Annotated[int, msgspec.Meta(ge=1)]
    max_num_blocks: int
    used_num_blocks: int = 0


class Iteration(msgspec.Struct, frozen=True, rename="camel"):
    """What the engine says of one of its iterations."""

    num_active_requests: int = 0
    num_queued_requests: int = 0
    kv_cache_stats: CacheStats | None = None


_version = msgspec.json.Decoder(_Version)
_models = msgspec.json.Decoder(_Models)
_server_info = msgspec.json.Decoder(_ServerInfo)
_iterations = msgspec.json.Decoder(tuple[Iteration, ...])


async def ask_facts(server: EngineServer) -> TrtllmFacts:
    """Ask the engine behind ``server``; what only an iteration tells is learned by one generated token.

    Raises WorkerUnreachable while it does not answer, ProtocolError for answers that cannot be read, and
    ConfigError for an engine that is none of TensorRT-LLM's.
    """
    version, model = await ask_name(server)
    told = await server.look(SERVER_INFO)
    block_size = None if told is None else _decoded(_server_info, told, SERVER_INFO).tokens_per_block
    last = await ask_iteration(server)
    if last is None and block_size is None:
        try:
            await server.look(GENERATE_ONE)
        except WorkerUnreachable:
            pass  # then its operator has to say what it does not tell
        else:
            last = await ask_iteration(server)
    cache = None if last is None else last.kv_cache_stats
    return TrtllmFacts(
        version=version,
        model=model,
        context_length=await _context_length(server),
        block_size=block_size if cache is None else cache.tokens_per_block,
        total_blocks=None if cache is None else cache.max_num_blocks,
    )


async def ask_name(server: EngineServer) -> tuple[str, str]:
    """Ask for the engine's version and the name of its model. Raises as :func:`ask_facts` does."""
    version = await server.look("/version")
    models = await server.look("/v1/models")
    if version is None or models is None:
        missing = "/version" if version is None else "/v1/models"
        raise ConfigError(f"--url: {server.url} has no {missing}: is it TensorRT-LLM's server?", param="url")
    model = _decoded(_models, models, "/v1/models").data[0]
    if model.owned_by != OWNER:
        raise ConfigError(
            f"--url: {server.url} serves a model that is owned by {model.owned_by!r}, not {OWNER!r}: "
            "is it TensorRT-LLM's server?",
            param="url",
        )
    return _decoded(_version, version, "/version").version, model.id


async def ask_iteration(server: EngineServer) -> Iteration | None:
    """Ask for the last iteration that told of its cache; None when none did since somebody asked.

    Raises WorkerUnreachable or ProtocolError.
    """
    iterations = await _iterations_of(server)
    return next((each for each in reversed(iterations) if each.kv_cache_stats is not None), None)


async def _iterations_of(server: EngineServer) -> tuple[Iteration, ...]:
    page = await server.look(ITERATIONS)
    return () if page is None else _decoded(_iterations, page, ITERATIONS)


async def _context_length(server: EngineServer) -> int | None:
    page = await server.look(METRICS)
    samples = {} if page is None else read_metrics(page, (CONFIG_METRIC,))
    told = [sample.labels.get("max_model_len", "") for sample in samples.get(CONFIG_METRIC, ())]
    return next((int(each) for each in told if each.isdecimal()), None)


def _decoded(decoder: "msgspec.json.Decoder[T]", body: bytes, path: str) -> T:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"{path}: {error}", param=path) from error

"""What TensorRT-LLM's server tells of itself; before 1.3 of its cache only when it ran something."""

import re
from dataclasses import dataclass
from typing import Annotated

import msgspec

from kvrouter.core.errors import ConfigError
from kvrouter.engines.openai.metrics import read_metrics
from kvrouter.engines.openai.server import EngineServer
from kvrouter.engines.trtllm.loads import Iteration, ask_iteration, decoded
from kvrouter.planes.requests.port import WorkerUnreachable

OWNER = "tensorrt_llm"
"""Whom the server names as its model's owner: by that it is known from other engines' servers."""

HEALTH = "/health"
SERVER_INFO = "/server_info"

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


_version = msgspec.json.Decoder(_Version)
_models = msgspec.json.Decoder(_Models)
_server_info = msgspec.json.Decoder(_ServerInfo)


async def ask_facts(server: EngineServer) -> TrtllmFacts:
    """Ask the engine behind ``server``; what only an iteration tells is learned by one generated token.

    Raises WorkerUnreachable while it does not answer, ProtocolError for answers that cannot be read, and
    ConfigError for an engine that is none of TensorRT-LLM's.
    """
    version, model = await ask_name(server)
    told = await server.look(SERVER_INFO)
    block_size = None if told is None else decoded(_server_info, told, SERVER_INFO).tokens_per_block
    last = await _iteration_of(server)
    if last is None and block_size is None:
        last = await _iteration_of(server, GENERATE_ONE)
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
        raise ConfigError(f"{server.url} has no {missing}: is it TensorRT-LLM's server?", param="url")
    model = decoded(_models, models, "/v1/models").data[0]
    if model.owned_by != OWNER:
        raise ConfigError(
            f"{server.url} serves a model that is owned by {model.owned_by!r}, not {OWNER!r}: "
            "is it TensorRT-LLM's server?",
            param="url",
        )
    return decoded(_version, version, "/version").version, model.id


async def _iteration_of(server: EngineServer, path: str | None = None) -> Iteration | None:
    """Ask for the last iteration, after ``path``; what does not tell it is said by the engine's operator."""
    try:
        if path is not None:
            await server.look(path)
        return await ask_iteration(server)
    except WorkerUnreachable:
        return None


async def _context_length(server: EngineServer) -> int | None:
    page = await server.look(METRICS)
    samples = {} if page is None else read_metrics(page, (CONFIG_METRIC,))
    told = [sample.labels.get("max_model_len", "") for sample in samples.get(CONFIG_METRIC, ())]
    return next((int(each) for each in told if each.isdecimal()), None)

"""The description of a live engine, from its pages and a folder: model, sizes, flags, GPUs."""

from pathlib import Path
from typing import Annotated, NamedTuple, TypeVar

import msgspec
from msgspec.structs import replace

from kvrouter.core.errors import ConfigError, ProtocolError
from kvrouter.core.files import read_regular
from kvrouter.core.json import Unreadable, decoded, parsed
from kvrouter.engines.openai.metrics import read_metrics
from kvrouter.engines.openai.request_times import CACHE, CacheSize, read_cache_size
from kvrouter.engines.openai.server import EngineServer
from kvrouter.sim.calibrate.measured_run import (
    RUN_FILE_BYTES_MAX,
    EngineFlags,
    RunHardware,
    RunMeta,
    read_hardware,
    read_json,
)

CONTEXT_TOKENS = 2_048
"""The context of an engine that does not report it; hardly any model has less."""

WORKERS = "kvrouter_worker_up"
"""The metric of a frontend of kvrouter that has a sample for each worker."""

Positive = Annotated[int, msgspec.Meta(ge=1)]


class _Model(msgspec.Struct, frozen=True):
    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: Positive | None = None


class _Models(msgspec.Struct, frozen=True):
    data: tuple[_Model, ...]


class _Version(msgspec.Struct, frozen=True):
    version: str = ""


class _SchedulerState(msgspec.Struct, frozen=True):
    effective_max_running_requests_per_dp: Positive | None = None


class _ServerInfo(msgspec.Struct, frozen=True):
    """SGLang's answer to ``/server_info``."""

    page_size: Positive
    max_total_num_tokens: Positive
    dp_size: Positive = 1
    tp_size: Positive = 1
    chunked_prefill_size: int | None = None
    max_running_requests: int | None = None
    internal_states: tuple[_SchedulerState, ...] = ()

    @property
    def max_num_seqs(self) -> int | None:
        """How many requests a rank runs at once: from its scheduler, which knows it without a flag."""
        for state in self.internal_states:
            if state.effective_max_running_requests_per_dp is not None:
                return state.effective_max_running_requests_per_dp
        return self.max_running_requests


class EngineDescription(NamedTuple):
    """One engine. ``served_model`` is its name in requests, ``meta.model`` the one that gives its shape.

    ``states_flags``: ``max_num_seqs`` and ``max_num_batched_tokens`` are not just assumed. ``notes`` are
    lines for the user on values that neither the engine nor a file gives.
    """

    served_model: str
    context_tokens: int
    meta: RunMeta
    hardware: RunHardware | None
    states_flags: bool
    notes: tuple[str, ...]

    @property
    def kv_tokens(self) -> int | None:
        """Tokens of KV that one rank holds; None if unknown."""
        flags = self.meta.engine_kwargs
        blocks = flags.num_gpu_blocks_override
        return None if blocks is None else blocks * flags.block_size


async def describe_engine(
    server: EngineServer, *, model: str | None, folder: Path | None
) -> EngineDescription:
    """Ask the engine behind ``server``, and read the existing files of ``folder``.

    The engine's values win. Raises ConfigError for a server of no model or of several, without ``model``, for
    a frontend of several engines, and for unreadable files; WorkerUnreachable and ProtocolError as the
    server's answers do.
    """
    page = await server.look("/v1/models")
    if page is None:
        raise ConfigError(f"{server.url} has no /v1/models: is it an OpenAI-compatible engine?", param="url")
    served = _served(_models(server, page), server.url, model)
    metrics = await server.metrics((WORKERS, CACHE))
    if metrics is not None:
        _check_one(server.url, metrics)
    version = await server.look("/version")
    meta, states_flags = _meta(folder, served)
    flags, notes = meta.engine_kwargs, []
    cache = None if metrics is None else read_cache_size(metrics)
    # A vLLM that has this page of SGLang's may take half a minute for it: it asks pip and compilers.
    about = None if cache is not None else _server_info(await server.look("/server_info"))
    if cache is not None:
        flags = _with_cache(flags, cache)
    elif about is not None:
        flags = _with_info(flags, about)
        states_flags = states_flags or about.max_num_seqs is not None
    if served.max_model_len is None:
        notes.append(f"max_model_len {CONTEXT_TOKENS}: the engine does not say")
    # Only vLLM says its version at this path.
    if version is not None and not meta.vllm_version:
        meta = replace(meta, vllm_version=_decoded(server, "/version", version, _Version).version)
    meta = replace(meta, engine_kwargs=flags)
    if not states_flags:
        notes.append(
            f"max_num_seqs {flags.max_num_seqs}, max_num_batched_tokens {flags.max_num_batched_tokens} and "
            f"async_scheduling {str(meta.plans_ahead).lower()}: the engine does not say; put them into "
            "meta.json of --engine"
        )
    return EngineDescription(
        served_model=served.id,
        context_tokens=served.max_model_len or CONTEXT_TOKENS,
        meta=meta,
        hardware=_hardware(folder, notes),
        states_flags=states_flags,
        notes=tuple(notes),
    )


def _models(server: EngineServer, page: bytes) -> _Models:
    try:
        return _decoded(server, "/v1/models", page, _Models)
    except ProtocolError as error:
        raise ProtocolError(f"{error.message}: is it an OpenAI-compatible engine?", param="url") from error


def _check_one(url: str, metrics: bytes) -> None:
    """Raise ConfigError for a frontend of kvrouter with several workers: each has its own timing, and their
    combined answers match no engine.
    """
    workers = {sample.labels.get("worker") for sample in read_metrics(metrics, (WORKERS,)).get(WORKERS, ())}
    if len(workers) > 1:
        raise ConfigError(
            f"{url} is a frontend of kvrouter with {len(workers)} workers: give the URL of one engine",
            param="url",
        )


def _served(models: _Models, url: str, model: str | None) -> _Model:
    found = [each for each in models.data if each.parent is None]
    names = ", ".join(each.id for each in found) or "none"
    if model is not None:
        found = [each for each in models.data if each.id == model]
        if not found:
            raise ConfigError(f"--model: {url} serves {names}, not {model!r}", param="model")
    if len(found) != 1:
        raise ConfigError(f"--model: is required: {url} serves {names}", param="model")
    return found[0]


def _meta(folder: Path | None, served: _Model) -> tuple[RunMeta, bool]:
    """Return the known flags of the engine, and whether a file states them."""
    if folder is not None:
        if not folder.is_dir():
            raise ConfigError(f"--engine: {folder} is no folder", param="engine")
        path = folder / "meta.json"
        if path.exists():
            return read_json(path, RunMeta), True
    return RunMeta(model=served.root or served.id, engine_kwargs=EngineFlags()), False


def _hardware(folder: Path | None, notes: list[str]) -> RunHardware | None:
    if folder is None or not (folder / "config.json").exists():
        return None
    return read_hardware(folder / "config.json", notes)


def _with_cache(flags: EngineFlags, cache: CacheSize) -> EngineFlags:
    return replace(
        flags,
        block_size=cache.block_size,
        num_gpu_blocks_override=cache.blocks,
        data_parallel_size=cache.n_ranks,
    )


def with_metrics(path: Path, flags: EngineFlags) -> EngineFlags:
    """Return ``flags`` with the sizes on the metrics page of a vLLM that ``path`` holds, if it exists."""
    if not path.exists():
        return flags
    try:
        cache = read_cache_size(read_regular(path, bytes_max=RUN_FILE_BYTES_MAX))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}", param=str(path)) from error
    except ProtocolError as error:
        raise ConfigError(f"{path}: {error.message}", param=error.param) from error
    if cache is None:
        raise ConfigError(f"{path}: {CACHE}: is required, the sizes of vLLM's KV cache", param=CACHE)
    return _with_cache(flags, cache)


def _with_info(flags: EngineFlags, info: _ServerInfo) -> EngineFlags:
    chunk = info.chunked_prefill_size
    return replace(
        flags,
        block_size=info.page_size,
        num_gpu_blocks_override=max(1, info.max_total_num_tokens // info.page_size),
        data_parallel_size=info.dp_size,
        tensor_parallel_size=info.tp_size,
        max_num_seqs=info.max_num_seqs or flags.max_num_seqs,
        max_num_batched_tokens=chunk if chunk is not None and chunk > 0 else flags.max_num_batched_tokens,
    )


_server_infos = msgspec.json.Decoder(_ServerInfo)


def _server_info(page: bytes | None) -> _ServerInfo | None:
    """Return SGLang's values; None for another server, which may answer anything there."""
    if page is None:
        return None
    try:
        return parsed(_server_infos, page)
    except Unreadable:
        return None


Answer = TypeVar("Answer")


def _decoded(server: EngineServer, path: str, page: bytes, kind: type[Answer]) -> Answer:
    return decoded(msgspec.json.Decoder(kind), page, f"{server.url}{path}", param=path)

"""What a vLLM server says of itself: version, model, cache, load."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec

from kvrouter.core.errors import ConfigError, ProtocolError
from kvrouter.core.ids import DpRank, WorkerId, WorkerRank
from kvrouter.core.json import decoded
from kvrouter.core.workers import KvTransfers, LoadReport
from kvrouter.engines.kv_events.listener import EventsAt
from kvrouter.engines.openai.metrics import Samples, read_metrics
from kvrouter.engines.openai.server import EngineServer
from kvrouter.transports.requests.port import WorkerUnreachable

T = TypeVar("T")

CACHE_METRIC = "vllm:cache_config_info"
STARTED_METRIC = "process_start_time_seconds"
NIXL_METRIC = "vllm:nixl_bytes_transferred_count"
"""Stands on the page of an engine with NixlConnector from its start on, and on no other's."""


@dataclass(frozen=True, slots=True)
class RankInfo:
    """One data-parallel rank's cache: tokens in a block, and how many blocks there are."""

    block_size: int
    total_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmInfo:
    """One engine. ``models`` are the names that it is served under, and its adapters; ``root`` the folder or
    hub name of the model. ``started_s`` distinguishes two starts. An engine that ``uses_nixl`` says after a
    prefill where the KV waits; other connectors may leave it to the decode engine to find it.
    """

    version: str
    models: tuple[str, ...]
    adapters: tuple[str, ...]
    root: str
    context_length: int
    prefix_caching: bool
    ranks: Mapping[DpRank, RankInfo]
    events: Mapping[DpRank, EventsAt]
    started_s: float | None
    uses_nixl: bool = False

    @property
    def block_size(self) -> int:
        """Tokens in a block, alike on every rank."""
        return next(iter(self.ranks.values())).block_size

    @property
    def identity(self) -> Mapping[str, object]:
        """What its worker's card and calls are made from (``Attached.identity``)."""
        return {
            "models": ", ".join(self.models),  # adapters are loaded while it runs
            "block size": self.block_size,
            "ranks": sorted(self.ranks),
            "context length": self.context_length,
        }


class _Model(msgspec.Struct, frozen=True):
    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None


class _Models(msgspec.Struct, frozen=True):
    data: tuple[_Model, ...]


class _Version(msgspec.Struct, frozen=True):
    version: str = ""


class _Source(msgspec.Struct, frozen=True):
    enable_kv_cache_events: bool = False
    publisher: str | None = None
    endpoint: str | None = None
    replay_endpoint: str | None = None
    topic: str = ""


_models = msgspec.json.Decoder(_Models)
_version = msgspec.json.Decoder(_Version)
_sources: "msgspec.json.Decoder[dict[str, _Source]]" = msgspec.json.Decoder(dict[str, _Source])


_METRICS = (CACHE_METRIC, STARTED_METRIC, NIXL_METRIC)


async def ask_info(server: EngineServer) -> VllmInfo:
    """Ask the engine behind ``server``.

    Raises WorkerUnreachable while it does not answer, ProtocolError for answers that cannot be read, and
    ConfigError for an engine that is none of vLLM's.
    """
    models = await server.look("/v1/models")
    page = await server.metrics(_METRICS)
    if models is None or page is None:
        missing = "/v1/models" if models is None else "/metrics"
        raise ConfigError(f"{server.url} has no {missing}: is it vLLM's server?", param="url")
    version = await server.look("/version")
    sources = await server.look("/kv_event_sources")
    samples = read_metrics(page, _METRICS)
    served, adapters = _served(decoded(_models, models, "/v1/models"))
    ranks, prefix_caching = _ranks(samples, server.url)
    return VllmInfo(
        version="" if version is None else decoded(_version, version, "/version").version,
        models=tuple(model.id for model in served),
        adapters=tuple(model.id for model in adapters),
        root=served[0].root or served[0].id,
        context_length=_context_length(served[0]),
        prefix_caching=prefix_caching,
        ranks=ranks,
        events={}
        if sources is None
        else _events(decoded(_sources, sources, "/kv_event_sources"), server.url),
        started_s=started_of(samples),
        uses_nixl=NIXL_METRIC in samples,
    )


def started_of(samples: Samples) -> float | None:
    """Return when the server's process began, on its own clock; None when its page lacks it."""
    found = samples.get(STARTED_METRIC, ())
    return found[0].value if found else None


def reachable(endpoint: str, url: str) -> str:
    """Return where an endpoint that the engine binds is reached: ``*`` stands for the host of its ``url``."""
    host = urlsplit(url).hostname or "127.0.0.1"
    host = f"[{host}]" if ":" in host else host
    return re.sub(r"^tcp://(?:\*|0\.0\.0\.0|\[::\])", f"tcp://{host}", endpoint)


def _served(models: _Models) -> tuple[list[_Model], list[_Model]]:
    served = [model for model in models.data if model.parent is None]
    if not served:
        raise WorkerUnreachable("the engine lists no model yet")
    return served, [model for model in models.data if model.parent is not None]


def _context_length(model: _Model) -> int:
    if model.max_model_len is None:
        raise ProtocolError("/v1/models: max_model_len is missing", param="max_model_len")
    return model.max_model_len


def _ranks(samples: Samples, url: str) -> tuple[dict[DpRank, RankInfo], bool]:
    found = samples.get(CACHE_METRIC)
    if not found:
        raise ConfigError(f"{url}/metrics has no {CACHE_METRIC}: is it vLLM's server?", param="url")
    ranks: dict[DpRank, RankInfo] = {}
    for sample in found:
        labels = sample.labels
        size = labels.get("hash_block_size", "None")
        size = labels.get("block_size", "") if size in ("None", "") else size
        ranks[DpRank(_number(labels.get("engine", "0"), "engine"))] = RankInfo(
            _number(size, "block_size"), _number(labels.get("num_gpu_blocks", ""), "num_gpu_blocks")
        )
    sizes = {rank.block_size for rank in ranks.values()}
    if len(sizes) > 1:
        raise ProtocolError(
            f"{CACHE_METRIC}: the ranks differ in block_size: {sorted(sizes)}", param="block_size"
        )
    return dict(sorted(ranks.items())), found[0].labels.get("enable_prefix_caching") == "True"


def _number(text: str, field: str) -> int:
    if not text.isdecimal():
        raise ProtocolError(f"{CACHE_METRIC}: {field} must be a number, not {text!r}", param=field)
    return int(text)


def _events(sources: dict[str, _Source], url: str) -> dict[DpRank, EventsAt]:
    found: dict[DpRank, EventsAt] = {}
    for rank, source in sources.items():
        if not source.enable_kv_cache_events or source.publisher != "zmq" or source.endpoint is None:
            continue
        replay = source.replay_endpoint
        found[DpRank(_number(rank, "rank"))] = EventsAt(
            reachable(source.endpoint, url), None if replay is None else reachable(replay, url), source.topic
        )
    return found


RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
USED = "vllm:kv_cache_usage_perc"
USED_BEFORE = "vllm:gpu_cache_usage_perc"
"""What versions before 0.11 call it."""

FETCHED_BY = ("nixl", "mooncake")
"""The connectors that count what an engine has fetched, from its start on, also where it never did:
MooncakeConnector does from 0.33 on. Each tensor-parallel rank of an engine counts its own part; handshakes
and notifications that failed count as failed transfers.
"""

TOKENS_BY_SOURCE = "vllm:prompt_tokens_by_source_total"
FETCHED_TOKENS = "external_kv_transfer"
"""The source of prompt tokens whose KV came from another engine."""

FIGURE_MAX = float(2**53)
"""What is larger is no count, and would not be exact."""

TRANSFER_METRICS = tuple(
    tuple(
        f"vllm:{connector}_{name}"
        for name in (
            "bytes_transferred_count",
            "bytes_transferred_sum",
            "xfer_time_seconds_sum",
            "num_failed_transfers_total",
        )
    )
    for connector in FETCHED_BY
)
"""Transfers, their bytes and seconds, and those that failed, by connector."""

LOAD_METRICS = (RUNNING, WAITING, USED, USED_BEFORE, *chain(*TRANSFER_METRICS), TOKENS_BY_SOURCE)


def load_reports(samples: Samples, ranks: Mapping[DpRank, RankInfo], worker_id: WorkerId) -> list[LoadReport]:
    """Return a report for each rank on the page."""
    used = _by_rank(samples, USED) or _by_rank(samples, USED_BEFORE)
    running, waiting = _by_rank(samples, RUNNING), _by_rank(samples, WAITING)
    transfers = _transfers(samples)
    return [
        LoadReport(
            rank=WorkerRank(worker_id, rank),
            active_blocks=round(used[rank] * facts.total_blocks),
            total_blocks=facts.total_blocks,
            running_requests=int(running.get(rank, 0)),
            waiting_requests=int(waiting.get(rank, 0)),
            kv_transfers=transfers.get(rank),
        )
        for rank, facts in ranks.items()
        if rank in used
    ]


def _transfers(samples: Samples) -> dict[DpRank, KvTransfers]:
    """What each rank has fetched, by whichever connectors; a rank is left out of those whose page lacks one
    of the three sums.
    """
    by_source = samples.get(TOKENS_BY_SOURCE, ())
    fetched = [sample for sample in by_source if sample.labels.get("source") == FETCHED_TOKENS]
    tokens = _by_rank({TOKENS_BY_SOURCE: fetched}, TOKENS_BY_SOURCE)
    fetched_by: dict[DpRank, KvTransfers] = {}
    for names in TRANSFER_METRICS:
        counts, sizes, times, failed = (_by_rank(samples, name) for name in names)
        for rank in counts.keys() & sizes.keys() & times.keys():
            before = fetched_by.get(rank, KvTransfers(0, 0, 0.0, tokens=int(tokens.get(rank, 0))))
            fetched_by[rank] = msgspec.structs.replace(
                before,
                transfers=before.transfers + int(counts[rank]),
                bytes=before.bytes + int(sizes[rank]),
                seconds=before.seconds + times[rank],
                failed=before.failed + int(failed.get(rank, 0)),
            )
    return fetched_by


def _by_rank(samples: Samples, name: str) -> dict[DpRank, float]:
    return {
        DpRank(int(sample.labels["engine"])): sample.value
        for sample in samples.get(name, ())
        if sample.labels.get("engine", "").isdecimal() and 0 <= sample.value < FIGURE_MAX
    }

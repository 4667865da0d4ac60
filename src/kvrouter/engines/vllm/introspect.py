"""The values that a vLLM server reports: version, model, cache, load."""

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec

from kvrouter.core.errors import KvrouterError, ProtocolError
from kvrouter.core.ids import DpRank, WorkerId, WorkerRank
from kvrouter.core.json import decoded
from kvrouter.core.requests import CallRoute
from kvrouter.core.workers import FORMAT_UNKNOWN, KvFormat, KvTransfers, LoadReport, Role, kv_part
from kvrouter.engines.kv_events.listener import EventsAt
from kvrouter.engines.openai.metrics import Samples
from kvrouter.engines.openai.pages import EnginePages, count_of, text_of
from kvrouter.engines.openai.server import EngineServer
from kvrouter.engines.vllm.calls import KEEP_KV, read_kept

T = TypeVar("T")

CACHE_METRIC = "vllm:cache_config_info"
STARTED_METRIC = "process_start_time_seconds"
NIXL_METRIC = "vllm:nixl_bytes_transferred_count"
"""Stands on the page of an engine with NixlConnector from its start on, and on no other's."""

CALL_LIMIT_S = 5.0
"""How long the answer of one token may take by which an engine shows its ``bidirectional_kv_xfer``."""


@dataclass(frozen=True, slots=True)
class RankInfo:
    """One data-parallel rank's cache: tokens in a block, and the number of blocks; None for unreported
    values.
    """

    block_size: int | None = None
    total_blocks: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmInfo:
    """The values of one engine; None for unreported ones, with a sentence on each in ``missing``. ``models``
    are its served names, and its adapters; ``root`` the folder or hub name of the model. ``started_s``
    distinguishes two starts. ``kv_dtype`` is empty for the model's own type. An engine that ``uses_nixl``
    reports after a prefill where the KV waits; other connectors may leave it to the decode engine to find it.
    With ``bidirectional_kv`` KV also goes from a decode engine to a prefill engine.
    """

    version: str
    models: tuple[str, ...]
    adapters: tuple[str, ...]
    root: str
    context_length: int | None
    prefix_caching: bool | None
    ranks: Mapping[DpRank, RankInfo]
    events: Mapping[DpRank, EventsAt]
    started_s: float | None
    uses_nixl: bool = False
    kv_dtype: str = ""
    bidirectional_kv: bool = False
    missing: tuple[str, ...] = ()
    has_metrics: bool = True

    @property
    def writes_choices(self) -> bool:
        """Whether it writes ``tool_choice`` and ``response_format`` into the prompt. vLLM does so for Kimi
        K3, which the name of the folder or repository shows.
        """
        return "kimi-k3" in self.root.lower().replace("_", "-")

    @property
    def block_size(self) -> int | None:
        """Tokens in a block, alike on every rank."""
        return next(iter(self.ranks.values())).block_size

    @property
    def identity(self) -> Mapping[str, object]:
        """The values from which its worker's card and calls are made (``Attached.identity``). An engine that
        did not show ``bidirectional_kv`` may have been slow.
        """
        return {
            "models": ", ".join(self.models),  # adapters are loaded while it runs
            "block size": self.block_size,
            "ranks": sorted(self.ranks),
            "context length": self.context_length,
            "KV format": str(self.kv_format),
            **({"bidirectional KV": True} if self.bidirectional_kv else {}),
        }

    @property
    def kv_format(self) -> KvFormat:
        """What its connector compares: NIXL's handshake wants the same vLLM and type of KV at both ends."""
        if not self.uses_nixl:
            return FORMAT_UNKNOWN
        return KvFormat(engine="vllm", version=kv_part(self.version), connector="nixl", dtype=self.kv_dtype)


class _Source(msgspec.Struct, frozen=True):
    enable_kv_cache_events: bool = False
    publisher: str | None = None
    endpoint: str | None = None
    replay_endpoint: str | None = None
    topic: str = ""


_sources: "msgspec.json.Decoder[dict[str, _Source]]" = msgspec.json.Decoder(dict[str, _Source])

_OF_METRICS = (
    "its block size, its number of KV blocks and its ranks are unknown, its KV events cannot be used unless "
    "block_size is said, and its load is what this router sends there (vLLM has no such metrics where it was "
    "started with --disable-log-stats: start it without)"
)

_METRICS = (CACHE_METRIC, STARTED_METRIC, NIXL_METRIC)


async def ask_info(
    server: EngineServer, *, model: str | None = None, dp_size: int = 1, role: Role = Role.BOTH
) -> VllmInfo:
    """Ask the engine behind ``server``, whose worker has this ``role``. ``model`` and ``dp_size`` stand in
    for unreported values.

    Raises WorkerUnreachable while it does not answer, and ConfigError if it is no vLLM engine.
    """
    pages = EnginePages(server)
    listed = await pages.models(owner="vllm", model=model)
    served = [each for each in listed if each.parent is None] or listed[:1]
    version = text_of((await pages.fields("/version", lost="its version is unknown")).get("version"))
    samples = await pages.metrics("/metrics", _METRICS)
    events = await _events_of(pages, server.url)
    found: Samples = {} if isinstance(samples, str) else samples
    ranks = _ranks(found, pages)
    if not ranks:
        why = samples if isinstance(samples, str) else f"/metrics has no {CACHE_METRIC}"
        pages.note(why, _OF_METRICS)
        ranks = dict.fromkeys(sorted(events) or map(DpRank, range(dp_size)), RankInfo())
    context_length = served[0].context_length
    if context_length is None:
        pages.note(
            "/v1/models has no max_model_len that can be read",
            "the length of its context is unknown, and no call is kept from it for its length",
        )
    cache = next((sample.labels for sample in found.get(CACHE_METRIC, ())), {})
    caching, kv_dtype = cache.get("enable_prefix_caching"), cache.get("cache_dtype", "")
    uses_nixl = NIXL_METRIC in found
    is_of_pair = uses_nixl and role is not Role.BOTH
    return VllmInfo(
        version=version or "",
        models=tuple(each.id for each in served),
        adapters=tuple(each.id for each in listed if each.parent is not None and each not in served),
        root=served[0].root or served[0].id,
        context_length=context_length,
        prefix_caching=None if caching is None else caching == "True",
        ranks=ranks,
        events=events,
        started_s=started_of(found),
        uses_nixl=uses_nixl,
        kv_dtype=kv_part(kv_dtype),
        bidirectional_kv=is_of_pair and await _has_bidirectional_kv(server, served[0].id),
        missing=pages.missing,
        has_metrics=not isinstance(samples, str),
    )


async def _has_bidirectional_kv(server: EngineServer, model: str) -> bool:
    """Whether an engine with NixlConnector shows ``bidirectional_kv_xfer``: only then it keeps KV although no
    prefill leg was sent. Without the flag it would wait forever for KV that a prefill leg is to fetch.
    """
    call = {"model": model, "prompt": [0], "max_tokens": 1, "kv_transfer_params": KEEP_KV}
    try:
        async with asyncio.timeout(CALL_LIMIT_S):
            answer = await server.ask(CallRoute.COMPLETION.value, msgspec.json.encode(call))
    except (KvrouterError, TimeoutError):
        return False
    return bool(read_kept(answer).kv_transfer_params)


def started_of(samples: Samples) -> float | None:
    """Return when the server's process began, on its own clock; None when its page lacks it."""
    found = samples.get(STARTED_METRIC, ())
    return found[0].value if found else None


def reachable(endpoint: str, url: str) -> str:
    """Return the address of an endpoint that the engine binds: the host of its ``url`` replaces ``*``."""
    host = urlsplit(url).hostname or "127.0.0.1"
    host = f"[{host}]" if ":" in host else host
    return re.sub(r"^tcp://(?:\*|0\.0\.0\.0|\[::\])", f"tcp://{host}", endpoint)


def _ranks(samples: Samples, pages: EnginePages) -> dict[DpRank, RankInfo]:
    """Return the cache values of each rank; empty without any."""
    ranks: dict[DpRank, RankInfo] = {}
    for sample in samples.get(CACHE_METRIC, ()):
        labels = sample.labels
        rank = count_of(labels.get("engine", "0"), least=0)
        if rank is not None:
            size = count_of(labels.get("hash_block_size")) or count_of(labels.get("block_size"))
            ranks[DpRank(rank)] = RankInfo(size, count_of(labels.get("num_gpu_blocks")))
    sizes = {rank.block_size for rank in ranks.values()}
    if len(sizes) > 1:
        pages.note(f"the ranks differ in block_size: {sizes}", _OF_BLOCK_SIZE)
        ranks = {rank: RankInfo(None, info.total_blocks) for rank, info in ranks.items()}
    elif sizes == {None}:
        pages.note(f"{CACHE_METRIC} has no block_size that can be read", _OF_BLOCK_SIZE)
    if any(info.total_blocks is None for info in ranks.values()):
        pages.note(
            f"{CACHE_METRIC} has no num_gpu_blocks that can be read",
            "its number of KV blocks is unknown: no busy threshold holds there, and its load is what this "
            "router sends there",
        )
    return dict(sorted(ranks.items()))


_OF_BLOCK_SIZE = (
    "its block size is unknown, and its KV events cannot be used (say it: block_size, --block-size)"
)


async def _events_of(pages: EnginePages, url: str) -> dict[DpRank, EventsAt]:
    """Return where each rank publishes; servers before 0.30 have no page for it."""
    page = await pages.page("/kv_event_sources")
    if isinstance(page, str):
        return {}
    try:
        sources = decoded(_sources, page, "/kv_event_sources")
    except ProtocolError as error:
        pages.note(error.message, "where it publishes KV events is unknown")
        return {}
    found: dict[DpRank, EventsAt] = {}
    for name, source in sources.items():
        rank = count_of(name, least=0)
        is_zmq = source.enable_kv_cache_events and source.publisher == "zmq"
        if rank is None or not is_zmq or source.endpoint is None:
            continue
        replay = source.replay_endpoint
        found[DpRank(rank)] = EventsAt(
            reachable(source.endpoint, url), None if replay is None else reachable(replay, url), source.topic
        )
    return found


RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
USED = "vllm:kv_cache_usage_perc"
USED_BEFORE = "vllm:gpu_cache_usage_perc"
"""The name in versions before 0.11."""

FETCHED_BY = ("nixl", "mooncake")
"""The connectors that count what an engine has fetched, from its start on, also if it is 0: MooncakeConnector
does from 0.33 on. Each tensor-parallel rank of an engine counts its own part; failed handshakes and
notifications count as failed transfers."""

TOKENS_BY_SOURCE = "vllm:prompt_tokens_by_source_total"
FETCHED_TOKENS = "external_kv_transfer"
"""The source of prompt tokens with KV from another engine."""

FIGURE_MAX = float(2**53)
"""A larger number is no count, and would not be exact."""

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
    """Return a report for each rank on the page with a known number of blocks."""
    used = _by_rank(samples, USED) or _by_rank(samples, USED_BEFORE)
    running, waiting = _by_rank(samples, RUNNING), _by_rank(samples, WAITING)
    transfers = _transfers(samples)
    return [
        LoadReport(
            rank=WorkerRank(worker_id, rank),
            active_blocks=round(used[rank] * info.total_blocks),
            total_blocks=info.total_blocks,
            running_requests=int(running.get(rank, 0)),
            waiting_requests=int(waiting.get(rank, 0)),
            kv_transfers=transfers.get(rank),
        )
        for rank, info in ranks.items()
        if rank in used and info.total_blocks is not None
    ]


def _transfers(samples: Samples) -> dict[DpRank, KvTransfers]:
    """Return the KV that each rank has fetched, over all connectors; ranks without all three sums are left
    out.
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

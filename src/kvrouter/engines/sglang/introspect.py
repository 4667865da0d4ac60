"""The values that an SGLang server reports: model, sizes, load."""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from urllib.parse import urlsplit

import msgspec

from kvrouter.core.errors import ProtocolError
from kvrouter.core.ids import DpRank, WorkerId, WorkerRank
from kvrouter.core.json import Unreadable, converted, decoded
from kvrouter.core.workers import FORMAT_UNKNOWN, KvFormat, LoadReport, Role, kv_part
from kvrouter.engines.kv_events.listener import EventsAt
from kvrouter.engines.openai.pages import EnginePages, check_serves, count_of, text_of
from kvrouter.engines.openai.server import EngineServer


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangInfo:
    """The values of one engine; None for unreported ones, with a sentence on each in ``missing``. ``role`` is
    allowed by its mode of disaggregation; ``bootstrap_port`` is that of its prefill handoffs. With
    ``tells_usage`` it writes the usage into every stream. ``started`` distinguishes two starts.
    """

    version: str
    model: str
    tokenizer: str
    context_length: int | None
    block_size: int | None
    total_blocks: int | None
    dp_size: int
    prefix_caching: bool
    tells_cached_tokens: bool
    tells_usage: bool
    role: Role
    bootstrap_port: int | None
    events: Mapping[DpRank, EventsAt]
    started: str | None
    kv_format: KvFormat = FORMAT_UNKNOWN
    missing: tuple[str, ...] = ()

    @property
    def identity(self) -> Mapping[str, object]:
        """The values from which its worker's card and calls are made (``Attached.identity``)."""
        return {
            "models": self.model,
            "page size": self.block_size,
            "ranks": self.dp_size,
            "context length": self.context_length,
            "modes of disaggregation": self.role.value,
            "bootstrap ports": self.bootstrap_port,
            "KV format": str(self.kv_format),
        }


class _Started(msgspec.Struct, frozen=True):
    startup_time: msgspec.Raw = msgspec.Raw(b"null")


class _Events(msgspec.Struct, frozen=True):
    endpoint_host: str = "*"
    endpoint_port_base: int | None = None
    replay_endpoint_port_base: int | None = None
    topic: str = ""
    dp_size: int = 1


class _Load(msgspec.Struct, frozen=True):
    dp_rank: int = 0
    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_waiting_uncached_tokens: int = 0
    num_used_tokens: int = 0
    max_total_num_tokens: int = 0


class _Loads(msgspec.Struct, frozen=True):
    loads: tuple[_Load, ...]


_loads = msgspec.json.Decoder(_Loads)
_started = msgspec.json.Decoder(_Started)
_value = msgspec.json.Decoder(object)

START_MAX_BYTES = 16 * 1024
"""A longer start is not read: an SGLang engine's has some hundred bytes."""

_EVERYWHERE = ("*", "0.0.0.0", "::")  # noqa: S104 - what an engine binds; nothing is bound here

_ROLES = {"prefill": Role.PREFILL, "decode": Role.DECODE}


async def ask_info(
    server: EngineServer, *, model: str | None = None, role: Role = Role.BOTH, dp_size: int = 1
) -> SglangInfo:
    """Ask the engine behind ``server``. ``model``, ``role`` and ``dp_size`` stand in for values that it does
    not report.

    Raises WorkerUnreachable while it does not answer, and ConfigError if it is no SGLang engine.
    """
    pages = EnginePages(server)
    listed = await pages.models(owner="sglang", model=model)
    server_info = await pages.fields(
        "/server_info", lost="its version, block size, number of KV blocks, ranks and KV events are unknown"
    )
    block_size = count_of(server_info.get("page_size"))
    if server_info and block_size is None:
        pages.note("/server_info has no page_size that can be read", _OF_PAGE_SIZE)
    tokens = count_of(server_info.get("max_total_num_tokens"), least=0)
    if server_info and tokens is None:
        pages.note(
            "/server_info has no max_total_num_tokens that can be read", "its number of KV blocks is unknown"
        )
    context_length = listed[0].context_length
    if context_length is None:
        pages.note(
            "/v1/models has no max_model_len that can be read",
            "the length of its context is unknown, and no call is kept from it for its length",
        )
    mode = server_info.get("disaggregation_mode")
    return SglangInfo(
        version=text_of(server_info.get("version")) or "",
        model=text_of(server_info.get("served_model_name")) or listed[0].id,
        tokenizer=text_of(server_info.get("tokenizer_path")) or listed[0].root or "",
        context_length=context_length,
        block_size=block_size,
        total_blocks=None if block_size is None or tokens is None else tokens // block_size,
        dp_size=count_of(server_info.get("dp_size")) or dp_size,
        prefix_caching=server_info.get("disable_radix_cache") is not True,
        tells_cached_tokens=server_info.get("enable_cache_report") is True if server_info else True,
        tells_usage=server_info.get("stream_response_default_include_usage") is True,
        role=_ROLES.get(mode, Role.BOTH) if isinstance(mode, str) else role,
        bootstrap_port=count_of(server_info.get("disaggregation_bootstrap_port")),
        kv_format=_kv_format(server_info) if isinstance(mode, str) and mode in _ROLES else FORMAT_UNKNOWN,
        events=_events_at(_events_of(server_info.get("kv_events"), pages), server.url),
        started=_start_of(server_info.get("startup_time")),
        missing=pages.missing,
    )


def _kv_format(server_info: Mapping[str, object]) -> KvFormat:
    """Return what the two halves of a pair must have in common."""
    backend = kv_part(text_of(server_info.get("disaggregation_transfer_backend")))
    return KvFormat(
        engine="sglang", connector=backend, dtype=kv_part(text_of(server_info.get("kv_cache_dtype")))
    )


_OF_PAGE_SIZE = "its block size is unknown, and its KV events cannot be used unless block_size is said"


def _events_of(value: object, pages: EnginePages) -> _Events | None:
    if value is None:
        return None
    try:
        return converted(value, _Events)
    except Unreadable as error:
        pages.note(f"/server_info: kv_events: {error}", "where it publishes KV events is unknown")
        return None


def start_on(page: bytes, where: str) -> str | None:
    """Return what distinguishes the start on a page ``/server_info`` from others: how long it took in its
    parts; None where the engine does not tell. Raises ProtocolError that begins with ``where``.
    """
    found = decoded(_started, page, where).startup_time
    return None if len(found) > START_MAX_BYTES else _start_of(decoded(_value, found, where))


def _start_of(startup_time: object) -> str | None:
    text = msgspec.json.encode(startup_time)
    if startup_time is None or len(text) > START_MAX_BYTES:
        return None
    return blake2b(text, digest_size=16).hexdigest()


async def ask_loads(
    server: EngineServer, worker_id: WorkerId, block_size: int | None, *, model: str
) -> tuple[LoadReport, ...]:
    """Ask how busy each rank is; without an answer, whether the engine still serves the model. Raises
    WorkerUnreachable or ConfigError.
    """
    page = await EnginePages(server).page("/v1/loads")
    try:
        loads = () if isinstance(page, str) else decoded(_loads, page, f"{server.url}/v1/loads").loads
    except ProtocolError:
        loads = ()
    if not loads:
        await check_serves(server, model, owner="sglang")
    if block_size is None:
        return ()
    return tuple(
        LoadReport(
            rank=WorkerRank(worker_id, DpRank(load.dp_rank)),
            active_blocks=-(-load.num_used_tokens // block_size),
            total_blocks=load.max_total_num_tokens // block_size,
            active_prefill_tokens=load.num_waiting_uncached_tokens,
            running_requests=load.num_running_reqs,
            waiting_requests=load.num_waiting_reqs,
        )
        for load in loads
    )


def _events_at(events: _Events | None, url: str) -> dict[DpRank, EventsAt]:
    """Rank r publishes on the base port plus r."""
    if events is None or events.endpoint_port_base is None:
        return {}
    host = events.endpoint_host
    if host in _EVERYWHERE:
        host = urlsplit(url).hostname or "127.0.0.1"
    host = f"[{host}]" if ":" in host else host
    replay = events.replay_endpoint_port_base
    return {
        DpRank(rank): EventsAt(
            f"tcp://{host}:{events.endpoint_port_base + rank}",
            None if replay is None else f"tcp://{host}:{replay + rank}",
            events.topic,
        )
        for rank in range(events.dp_size)
    }

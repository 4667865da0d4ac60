"""What an SGLang server says of itself: model, sizes, load."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated
from urllib.parse import urlsplit

import msgspec

from kvrouter.core.errors import ConfigError
from kvrouter.core.ids import DpRank, WorkerId, WorkerRank
from kvrouter.core.json import decoded
from kvrouter.core.workers import LoadReport, Role
from kvrouter.engines.kv_events.listener import EventsAt
from kvrouter.engines.openai.server import EngineServer


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangInfo:
    """One engine. ``role`` is what its mode of disaggregation allows; ``bootstrap_port`` where its prefill
    handoffs meet. With ``tells_usage`` it writes the usage into streams of clients who ask for none.
    ``started`` distinguishes two starts.
    """

    version: str
    model: str
    tokenizer: str
    context_length: int
    block_size: int
    total_blocks: int
    dp_size: int
    prefix_caching: bool
    tells_cached_tokens: bool
    tells_usage: bool
    role: Role
    bootstrap_port: int | None
    events: Mapping[DpRank, EventsAt]
    started: str

    @property
    def identity(self) -> Mapping[str, object]:
        """What its worker's card and calls are made from (``Attached.identity``)."""
        return {
            "models": self.model,
            "page size": self.block_size,
            "ranks": self.dp_size,
            "context length": self.context_length,
            "modes of disaggregation": self.role.value,
            "bootstrap ports": self.bootstrap_port,
        }


class _Events(msgspec.Struct, frozen=True):
    endpoint_host: str = "*"
    endpoint_port_base: int | None = None
    replay_endpoint_port_base: int | None = None
    topic: str = ""
    dp_size: int = 1


class _Server(msgspec.Struct, frozen=True):
    page_size: Annotated[int, msgspec.Meta(ge=1)]
    max_total_num_tokens: int
    served_model_name: str
    tokenizer_path: str = ""
    version: str = ""
    dp_size: int = 1
    disable_radix_cache: bool = False
    enable_cache_report: bool = False
    stream_response_default_include_usage: bool = False
    disaggregation_mode: str = "null"
    disaggregation_bootstrap_port: int | None = None
    kv_events: _Events | None = None
    startup_time: object = None


class _Model(msgspec.Struct, frozen=True):
    id: str
    max_model_len: int


class _Models(msgspec.Struct, frozen=True):
    data: Annotated[tuple[_Model, ...], msgspec.Meta(min_length=1)]


class _Load(msgspec.Struct, frozen=True):
    dp_rank: int = 0
    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_waiting_uncached_tokens: int = 0
    num_used_tokens: int = 0
    max_total_num_tokens: int = 0


class _Loads(msgspec.Struct, frozen=True):
    loads: tuple[_Load, ...]


_server = msgspec.json.Decoder(_Server)
_models = msgspec.json.Decoder(_Models)
_loads = msgspec.json.Decoder(_Loads)

_EVERYWHERE = ("*", "0.0.0.0", "::")  # noqa: S104 - what an engine binds; nothing is bound here

_ROLES = {"prefill": Role.PREFILL, "decode": Role.DECODE}


async def ask_info(server: EngineServer) -> SglangInfo:
    """Ask the engine behind ``server``.

    Raises WorkerUnreachable while it does not answer, ProtocolError for answers that cannot be read, and
    ConfigError for an engine that is none of SGLang's.
    """
    page = await server.look("/server_info")
    models = await server.look("/v1/models")
    if page is None or models is None:
        missing = "/server_info" if page is None else "/v1/models"
        raise ConfigError(f"{server.url} has no {missing}: is it SGLang's server?", param="url")
    said = decoded(_server, page, f"{server.url}/server_info", param="server_info")
    context_length = decoded(_models, models, f"{server.url}/v1/models", param="models").data[0].max_model_len
    return SglangInfo(
        version=said.version,
        model=said.served_model_name,
        tokenizer=said.tokenizer_path,
        context_length=context_length,
        block_size=said.page_size,
        total_blocks=said.max_total_num_tokens // said.page_size,
        dp_size=said.dp_size,
        prefix_caching=not said.disable_radix_cache,
        tells_cached_tokens=said.enable_cache_report,
        tells_usage=said.stream_response_default_include_usage,
        role=_ROLES.get(said.disaggregation_mode, Role.BOTH),
        bootstrap_port=said.disaggregation_bootstrap_port,
        events=_events_at(said.kv_events, server.url),
        started=str(said.startup_time),
    )


async def ask_loads(server: EngineServer, worker_id: WorkerId, block_size: int) -> tuple[LoadReport, ...]:
    """Ask how busy each rank is. Raises WorkerUnreachable or ProtocolError."""
    page = await server.look("/v1/loads")
    if page is None:
        return ()
    loads = decoded(_loads, page, f"{server.url}/v1/loads", param="loads").loads
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

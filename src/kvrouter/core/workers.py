"""A worker's registration (its card) and its load reports."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Flag, StrEnum, auto
from typing import Annotated, Final, NamedTuple

import msgspec

from kvrouter.core.ids import DpRank, Epoch, ModelName, Taint, WorkerId, WorkerRank


class Role(StrEnum):
    """Which leg of a request a worker serves; ``BOTH`` is an aggregated worker that takes decode legs too."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class ModelInput(StrEnum):
    """The input of a worker's handler. KV routing needs ``Tokens``."""

    Tokens = "tokens"
    Text = "text"


class ModelType(Flag):
    """The routes that a worker registers to serve."""

    Chat = auto()
    Completions = auto()
    Prefill = auto()


class Enforcement(StrEnum):
    """How strictly a KV transfer stays in its topology domain."""

    REQUIRED = "required"
    PREFERRED = "preferred"
    FALLBACK = "fallback"


class EventTransport(StrEnum):
    """The event transport on which one worker publishes; a fleet may have workers on several."""

    MEMORY = "memory"
    ZMQ = "zmq"
    NATS = "nats"
    JETSTREAM = "jetstream"


class EventSource(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where routers subscribe to a worker's KV events.

    ``events`` and ``recovery`` are the endpoints to connect to on a transport without a broker, else empty.
    """

    transport: EventTransport = msgspec.field(name="lane")
    events: str = ""
    recovery: str = ""


KV_PART_MAX_CHARACTERS = 128
"""The longest part of a KV format; longer ones that an engine reports count as unknown."""

ANY = "any"
"""The stated part of a KV format that fits every other one, as where an engine does not compare it."""

_Part = Annotated[str, msgspec.Meta(max_length=KV_PART_MAX_CHARACTERS)]


class KvFormat(msgspec.Struct, frozen=True, omit_defaults=True):
    """What both ends of a KV transfer must have in common; an empty part is unknown, and fits every other one
    as :data:`ANY` does.

    ``version`` is the engine's, where its connector compares it; ``hash`` stands for all that an engine
    compares by a hash.
    """

    engine: _Part = ""
    version: _Part = ""
    connector: _Part = ""
    connector_version: _Part = ""
    transfer_mode: _Part = ""
    block_size: _Part = ""
    dtype: _Part = ""
    layout: _Part = ""
    parallelism: _Part = ""
    hash: _Part = ""

    def __str__(self) -> str:
        """The known parts, as ``engine=vllm version=0.32.0``; ``unknown`` without any."""
        return " ".join(f"{name}={value}" for name, value in self.known.items()) or "unknown"

    @property
    def known(self) -> dict[str, str]:
        """The known parts."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value}

    def over(self, other: "KvFormat") -> "KvFormat":
        """Return this format with its unknown parts as in ``other``."""
        known = self.known
        return msgspec.structs.replace(other, **known) if known else other


FORMAT_UNKNOWN: Final = KvFormat()


def can_transfer(prefill: KvFormat, decode: KvFormat) -> bool:
    """Whether KV can be handed from a prefill to a decode worker: no part of their formats is known to
    differ.
    """
    parts = zip(msgspec.structs.astuple(prefill), msgspec.structs.astuple(decode), strict=True)
    return all(sent == taken or not (sent and taken) or ANY in (sent, taken) for sent, taken in parts)


class KvPeer(NamedTuple):
    """One end of handoffs. Workers with equal ``engine`` and ``kv_format`` are of one build."""

    worker_id: WorkerId
    engine: str
    kv_format: KvFormat


def kv_part(reported: str | None) -> str:
    """Return a part of a KV format as an engine reports it: empty where it says ``auto``, which is the
    model's own, or more than a card can hold; ``bf16`` and ``bfloat16`` are one.
    """
    if not reported or reported == "auto" or len(reported) > KV_PART_MAX_CHARACTERS:
        return ""
    return "bfloat16" if reported == "bf16" else reported


class ModelRuntimeConfig(msgspec.Struct, frozen=True, omit_defaults=True):
    """The part of a worker's card that operators set; unset fields are not serialised.

    ``kv_transfer_preferred_weight`` is only read when the enforcement is ``preferred``; 0 ≤ weight ≤ 1.
    The worker prefills prompts of ``prompt_tokens_min`` to ``prompt_tokens_max`` tokens, as in separate pools
    for short and long prompts; None for no limit.
    """

    topology_domains: Mapping[str, str] = {}
    topology_levels: tuple[str, ...] = ()
    kv_transfer_domain: str | None = None
    kv_transfer_enforcement: Enforcement | None = None
    kv_transfer_preferred_weight: float | None = None
    taints: frozenset[Taint] = frozenset()
    total_kv_blocks: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    kv_bytes_per_token: int | None = None
    enable_local_indexer: bool = False
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None
    prompt_tokens_min: int | None = None
    prompt_tokens_max: int | None = None
    kv_format: KvFormat = FORMAT_UNKNOWN

    @property
    def domains(self) -> dict[str, str]:
        """The domains and values, trimmed; a domain without a name or a value is left out."""
        trimmed = ((domain.strip(), value.strip()) for domain, value in self.topology_domains.items())
        return {domain: value for domain, value in trimmed if domain and value}


SEVERAL_ENGINES = "is an address before several engines: give kvrouter each engine's own URL"
"""What is wrong with a URL at which several engines answer, and what to do."""

BLOCK_SIZE_UNKNOWN = 16
"""The assumed block size, in tokens, when an engine does not report its own."""

CONTEXT_TOKENS_UNKNOWN = 1_048_576
"""The assumed context length, in tokens, when an engine does not report its own."""

ENGINE_SIZE_MAX = 1 << 20
"""The largest size of an engine that a calibration reads, such as its number of KV blocks."""


def component_of(role: Role, name: str | None = None) -> str:
    """The component of a worker: ``name``, or what its role has without one."""
    return name or ("prefill" if role is Role.PREFILL else "backend")


class WorkerCard(msgspec.Struct, frozen=True, omit_defaults=True):
    """A worker's registration, as discovery publishes it. A new ``incarnation`` of the same id is a new
    worker.

    ``block_size`` and ``context_length`` are in tokens; None when the engine does not report them: the worker
    then joins workers with any block size, and accepts calls of any length.
    ``tokenizer`` is the folder of the model's tokenizer on the worker's host, a Hugging Face repository, or
    ``mock``; a frontend loads it unless it is configured with its own. A worker that ``takes_calls`` passes a
    client's call to its engine unchanged; other workers get tokens and sampling parameters. With
    ``cache_is_partial`` some KV events of its engine never arrive: it holds more blocks than it reports. Its
    engine reuses a block only when the prompt also has the ``lookahead_tokens`` tokens behind it. ``names``
    are further names that calls may use: an alias of the model (None), or one of its adapters.
    A ``decode_only`` worker needs the KV of every prompt, as SGLang's decode engines do. With
    ``ends_after_transfer`` its prefill legs end when their KV was fetched, not when it was computed. With
    ``bidirectional_kv`` a prefill worker can also fetch KV, and a decode worker keep it for one that does.
    ``engine`` names the engine, as ``vllm 0.32.0`` or ``mock``; ``pod`` is the worker's Kubernetes pod, and
    ``node`` that pod's node, else its host. ``engine_url`` is the HTTP address of the engine, and ``version``
    the worker's version of kvrouter; ``engine_start`` distinguishes two starts of the engine. All six are
    empty when unknown. ``engine_silent``: the engine does not answer the worker, or was replaced.
    ``several_engines``: ``engine_url`` is an address behind which several engines answer. ``draining``: the
    worker is about to leave.
    """

    worker_id: WorkerId
    incarnation: Epoch
    model: ModelName
    role: Role
    block_size: int | None
    context_length: int | None
    address: str
    dp_size: int = 1
    dp_start: int = 0
    namespace: str = "default"
    component: str = "backend"
    endpoint: str = "generate"
    model_input: ModelInput = ModelInput.Tokens
    serves: ModelType = ModelType.Chat | ModelType.Completions
    publishes_kv_events: bool = True
    event_source: EventSource = EventSource(EventTransport.MEMORY)
    tokenizer: str | None = None
    takes_calls: bool = False
    names: Mapping[str, str | None] = {}
    cache_is_partial: bool = False
    lookahead_tokens: int = 0
    draining: bool = False
    engine: str = ""
    pod: str = ""
    node: str = ""
    engine_silent: bool = False
    decode_only: bool = False
    ends_after_transfer: bool = False
    bidirectional_kv: bool = False
    engine_url: str = ""
    version: str = ""
    several_engines: bool = False
    engine_start: str = ""
    runtime_config: ModelRuntimeConfig = ModelRuntimeConfig()

    @property
    def takes_new_requests(self) -> bool:
        """Whether the worker accepts new requests; running requests continue in either case."""
        return not (self.draining or self.engine_silent)

    @property
    def kv_peer(self) -> KvPeer:
        """The worker as one end of handoffs."""
        return KvPeer(self.worker_id, self.engine, self.runtime_config.kv_format)

    def ranks(self) -> tuple[WorkerRank, ...]:
        """Return the worker's ranks in order."""
        return tuple(
            WorkerRank(self.worker_id, DpRank(rank))
            for rank in range(self.dp_start, self.dp_start + self.dp_size)
        )


class KvTransfers(msgspec.Struct, frozen=True):
    """The KV that one worker rank has fetched from others since its engine started, as the engine counts it.

    ``seconds`` sums the durations of the transfers: ``bytes / seconds`` is the mean bandwidth of one
    transfer. ``tokens`` counts the prompt tokens whose KV was fetched; 0 when the engine does not count them.
    """

    transfers: int
    bytes: int
    seconds: float
    failed: int = 0
    tokens: int = 0


class LoadReport(msgspec.Struct, frozen=True):
    """The latest load of one worker rank, as its engine counts it (Dynamo's ForwardPassMetrics).

    A newer report replaces an older one. ``active_prefill_tokens`` and ``kv_transfers`` are None when an
    engine does not report them. ``kv_events_skipped`` counts, by reason, the rank's KV events that its worker
    did not pass on since the engine started.
    """

    rank: WorkerRank
    active_blocks: int
    total_blocks: int
    active_prefill_tokens: int | None = None
    running_requests: int = 0
    waiting_requests: int = 0
    kv_transfers: KvTransfers | None = None
    kv_events_skipped: Mapping[str, int] = {}


class PodPort(NamedTuple):
    """A TCP port that a container declares; ``name`` may be empty."""

    name: str
    number: int
    container: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePod:
    """The current state of one Kubernetes pod.

    ``starts`` identifies the current start of each container. A pod that ``is_leaving`` was deleted and still
    runs; a pod that ``is_over`` has ended for good.
    """

    namespace: str
    name: str
    uid: str
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    node: str = ""
    ip: str = ""
    ports: tuple[PodPort, ...] = ()
    starts: Mapping[str, str] = field(default_factory=dict)
    is_ready: bool = False
    is_leaving: bool = False
    is_over: bool = False

"""A worker's registration (its card) and its load reports."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Flag, StrEnum, auto
from typing import NamedTuple

import msgspec

from kvrouter.core.ids import DpRank, Epoch, ModelName, Taint, WorkerId, WorkerRank


class Role(StrEnum):
    """Which leg of a request a worker serves; ``BOTH`` is an aggregated worker that takes decode legs too."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class ModelInput(StrEnum):
    """What a worker's handler receives. KV routing needs ``Tokens``."""

    Tokens = "tokens"
    Text = "text"


class ModelType(Flag):
    """Which routes a worker serves, as it registers them."""

    Chat = auto()
    Completions = auto()
    Prefill = auto()


class Enforcement(StrEnum):
    """How strictly a KV transfer keeps to its domain."""

    REQUIRED = "required"
    PREFERRED = "preferred"
    FALLBACK = "fallback"


class EventLane(StrEnum):
    """The event plane on which one worker publishes; a fleet may have workers on several."""

    MEMORY = "memory"
    ZMQ = "zmq"
    NATS = "nats"
    JETSTREAM = "jetstream"


class EventSource(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where routers hear a worker's KV events.

    ``events`` and ``recovery`` are the endpoints to connect to for an event transport without a broker;
    elsewhere empty.
    """

    lane: EventLane
    events: str = ""
    recovery: str = ""


class ModelRuntimeConfig(msgspec.Struct, frozen=True, omit_defaults=True):
    """The part of a worker's card that operators set; fields that are not set are not serialised.

    ``kv_transfer_preferred_weight`` is only read when the enforcement is ``preferred``; 0 ≤ weight ≤ 1.
    Prompts of ``prompt_tokens_min`` to ``prompt_tokens_max`` tokens are prefilled there: pools for short and
    for long ones; None for any length.
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


BLOCK_SIZE_UNKNOWN = 16
"""Load is counted in blocks of so many tokens where nobody tells how long an engine's blocks are."""

CONTEXT_TOKENS_UNKNOWN = 1_048_576
"""A context whose length nobody tells counts as one of so many tokens."""


class WorkerCard(msgspec.Struct, frozen=True, omit_defaults=True):
    """A worker as discovery publishes it. A new ``incarnation`` of the same id is a new worker.

    ``block_size`` and ``context_length`` are in tokens, and None where its engine does not tell them: such a
    worker joins workers with blocks of any size, and no call is too long for it.
    ``tokenizer`` is the folder of the model's tokenizer as the worker sees it, a Hugging Face repository, or
    ``mock``; a frontend that was given none of its own for the model loads that. A worker that
    ``takes_calls`` gives its engine a client's call as it was written; the others serve what their frontend
    understands of it. With ``cache_is_partial`` some of its engine's KV events are lost for good: it holds
    more than it reports. Its engine finds a block again only for a prompt that also has the
    ``lookahead_tokens`` behind it. ``names`` are what else calls may ask it for: another name of the model
    (None), or an adapter of it.
    One that is ``decode_only`` takes no prompt without its KV, as SGLang's decode engines do; a prefill leg
    that ``ends_after_transfer`` ends when its KV was fetched, and not when it is computed.
    ``engine`` is what serves behind it, as ``vllm 0.32.0`` or ``mock``, ``pod`` the Kubernetes pod that it is
    in, and ``node`` that pod's node, else its host; empty where nobody says. ``engine_url`` is the HTTP
    address at which the worker reaches that engine, and ``version`` the version of kvrouter that the worker
    runs; empty where nobody says. While it is
    ``engine_silent`` that engine does not answer it, or is another one now; one that is ``draining`` leaves.
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
    event_source: EventSource = EventSource(EventLane.MEMORY)
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
    engine_url: str = ""
    version: str = ""
    runtime_config: ModelRuntimeConfig = ModelRuntimeConfig()

    @property
    def takes_new_requests(self) -> bool:
        """Whether new requests may be sent there; those that run go on in either case."""
        return not (self.draining or self.engine_silent)

    def ranks(self) -> tuple[WorkerRank, ...]:
        """Every worker rank behind this card, in order."""
        return tuple(
            WorkerRank(self.worker_id, DpRank(rank))
            for rank in range(self.dp_start, self.dp_start + self.dp_size)
        )


class KvTransfers(msgspec.Struct, frozen=True):
    """The KV that one worker rank has fetched from others since its engine began, by the engine's own count.

    ``seconds`` is what the transfers took, each by itself: ``bytes / seconds`` is how fast KV travels.
    ``tokens`` are those of the prompts whose KV it was; 0 where an engine does not count them.
    """

    transfers: int
    bytes: int
    seconds: float
    failed: int = 0
    tokens: int = 0


class LoadReport(msgspec.Struct, frozen=True):
    """The latest load of one worker rank, as the engine itself counts it (Dynamo's ForwardPassMetrics).

    A report is a latest value, never a queue: a newer one replaces it. ``active_prefill_tokens`` and
    ``kv_transfers`` are None where an engine does not report them. ``kv_events_skipped`` counts, by reason,
    what its worker did not pass on of the rank's KV events since the engine began.
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
    """A TCP port that a container says it listens on; ``name`` may be empty."""

    name: str
    number: int
    container: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePod:
    """One pod as its namespace shows it now.

    ``starts`` distinguishes, by the container, one start of it from the next. A pod that ``is_leaving`` was
    deleted and has not ended yet; one that ``is_over`` has ended for good.
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

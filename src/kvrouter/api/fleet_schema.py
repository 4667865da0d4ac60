"""Answers of ``GET /v1/fleet``, ``/v1/flows`` and ``/v1/refusals``: a router's view of workers and models."""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct

from kvrouter.core.errors import Reason
from kvrouter.core.workers import Enforcement, Role

RoleName = Annotated[str, Meta(extra_json_schema={"enum": [each.value for each in Role]})]
EnforcementName = Annotated[str, Meta(extra_json_schema={"enum": [each.value for each in Enforcement]})]
"""Strings, not enumerations: a newer router may have members that its reader does not know."""


class Policy(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A transfer policy: how strictly KV stays in a domain; ``weight`` is set for a preferred domain only."""

    enforcement: EnforcementName
    domain: str
    weight: float | None = None


class Discovery(Struct, frozen=True, kw_only=True):
    """Whether discovery, or the cordon store, is reachable, and why not."""

    reachable: bool = True
    why: str | None = None


class Replicas(Struct, frozen=True, kw_only=True):
    """The other router replicas in replica sync."""

    others: int
    behind: int


class PrefillNear(Struct, frozen=True, kw_only=True):
    """The domain that prefill stays near; ``value`` is None while the frontend's own place is unknown."""

    domain: str
    value: str | None
    required: bool


class BrokenPair(Struct, frozen=True, kw_only=True):
    """A worker pair that lost KV recently, and the state of its circuit. ``reason`` is ``kv_lost``, or
    ``cannot_transfer`` where their engines refuse each other.
    """

    prefill_worker_id: int
    decode_worker_id: int
    circuit: str
    reason: str = Reason.KV_LOST.value


class LearnedLink(Struct, frozen=True, kw_only=True):
    """A link, or a kind of link, as learned from handoffs; ``slowness_interval`` is None without bounds."""

    link: str
    latency_s: float = 0.0
    bandwidth_bytes_per_s: float
    slowness: float
    slowness_interval: tuple[float, float] | None = None
    transfers: int
    slow: bool


class EngineSums(Struct, frozen=True, kw_only=True):
    """The bandwidth that engines report over all transfers, against the bandwidth the router observes."""

    bandwidth_bytes_per_s: float
    seen_bytes_per_s: float
    ratio: float
    agree: bool


class Links(Struct, frozen=True, kw_only=True):
    """A model's learned links."""

    alike: bool = True
    engines: EngineSums | None
    learned: Sequence[LearnedLink]


class Index(Struct, frozen=True, kw_only=True):
    """The size of a model's index; ``blocks`` by medium."""

    blocks: Mapping[str, int]
    bytes: int


class PromptShape(Struct, frozen=True, kw_only=True):
    """Answered calls of one shape, and how many were tokenized differently from the router's prompt."""

    shape: str
    answers: int
    missed: int
    blind: bool


class UnrenderedChats(Struct, frozen=True, kw_only=True):
    """The number of a model's chats that the router could not render, for one reason."""

    reason: str
    chats: int
    detail: str


class CacheHits(Struct, frozen=True, kw_only=True):
    """Prompt tokens of some requests, and how many of them were cached, by one count."""

    requests: int
    prompt_tokens: int
    cached_tokens: int


class ServedRequests(Struct, frozen=True, kw_only=True):
    """Calls that ended in the last ``window_s`` seconds. Prompt tokens and times are of the ``first_tokens``
    calls whose first token came; ``predicted`` hits are the router's, where it knows the prompt, ``reported``
    ones the engines', where they count them. Times are None without a first token, and since the start.
    """

    window_s: float
    requests: int
    errors: int
    first_tokens: int
    prompt_tokens: int
    completion_tokens: int
    ttft_p50_s: float | None = None
    ttft_p99_s: float | None = None
    predicted: CacheHits
    reported: CacheHits


class RequestStats(Struct, frozen=True, kw_only=True):
    """The calls that ended in the last minute, in the last five, and since the router began. At most the last
    4,096 calls are in the first two, whose ``window_s`` says how far they reach.
    """

    last_minute: ServedRequests
    last_5_minutes: ServedRequests
    since_start: ServedRequests


class Model(Struct, frozen=True, kw_only=True):
    """A model that workers registered. ``routing_reason`` says why its calls are routed by load and text;
    None when they are not. ``router_cost_reason`` says why ``router_cost`` is in use. ``pair_capacity`` is
    the share of the capacity of pairs that is left while not all prefill and decode workers can talk.
    """

    model: str
    block_size: int
    router_mode: str = ""
    cache_view: str | None = None
    routing: str | None = None
    routing_reason: str | None = None
    tokenized_by: str | None = None
    prefill_near: PrefillNear | None = None
    router_cost: str = ""
    router_cost_reason: str = ""
    router_pd_selection: str = ""
    links: Links | None = None
    workers: int = 0
    worker_ranks: int = 0
    waiting_requests: int = 0
    parted_pairs: Sequence[BrokenPair] = ()
    pair_capacity: float = 1.0
    index: Index | None = None
    prompt_shapes: Sequence[PromptShape] = ()
    unrendered_chats: Sequence[UnrenderedChats] = ()
    request_stats: RequestStats | None = None
    kv_transfer_default: Policy | None = None
    active_decode_blocks_threshold: float | None = None
    active_prefill_tokens_threshold: int | None = None

    @property
    def indexes_events(self) -> bool:
        """Whether the router indexes the model's KV events."""
        return self.cache_view == "events"


class LoadSeen(Struct, frozen=True, kw_only=True):
    """A rank's own load report."""

    active_blocks: int = 0
    active_prefill_tokens: int | None = None
    running_requests: int
    waiting_requests: int


class Feed(Struct, frozen=True, kw_only=True):
    """A rank's event stream."""

    state: str
    stale_s: float = 0.0
    silent_s: float = 0.0
    kv_events_missing: bool | None = None
    clock_ahead_s: float | None = None


class Predictions(Struct, frozen=True, kw_only=True):
    """Predicted against actual cached tokens of a rank's last answers, which span ``span_s``."""

    answers: int
    wrong: int
    wrong_share: float
    mean_error_blocks: float
    span_s: float | None = None


class Speed(Struct, frozen=True, kw_only=True):
    """A rank's slowness against its engine's timing, and ``relative`` to similar ranks."""

    slowness: float = 1.0
    decode_slowness: float = 1.0
    relative: float
    requests: int = 0
    predicted_ttft_s: float = 0.0
    seen_ttft_s: float = 0.0
    slow: bool


class Transfers(Struct, frozen=True, kw_only=True):
    """The KV transfers that a rank received, as its engine counts them."""

    transfers: int
    failed: int
    bytes: int = 0
    seconds: float = 0.0
    gb_per_s: float | None
    shown_gb_per_s: float | None
    slow: bool


class Rank(Struct, frozen=True, kw_only=True):
    """A worker rank. Unknown values are None."""

    dp_rank: int = 0
    active_blocks: int = 0
    prefill_tokens: int = 0
    total_blocks: int | None
    report: LoadSeen | None = None
    index_blocks: int | None = None
    feed: Feed | None = None
    kv_events_skipped: Mapping[str, int] | None = None
    predictions: Predictions | None = None
    speed: Speed | None = None
    kv_transfers: Transfers | None = None


class Cordoned(Struct, frozen=True, kw_only=True):
    """A cordon; ``at`` is its time of creation, None when unknown."""

    level: str
    name: str
    reason: str | None = None
    by: str | None = None
    at: str | None = None
    source: str = "call"
    cluster: str | None = None

    @property
    def place(self) -> str:
        """The cordoned level and name."""
        return f"{self.level} {self.name}"


class PromptTokens(Struct, frozen=True, kw_only=True):
    """The shortest and the longest prompt that a worker is meant for, in tokens; None without a limit."""

    min: int | None
    max: int | None


class Worker(Struct, frozen=True, kw_only=True):
    """A worker. Values that it does not report are None. ``kv_format`` has the known parts; ``kv_partners``
    counts the available ranks that it can hand KV to, or take KV from: None when all can talk.
    """

    worker_id: int
    model: str
    role: RoleName
    alive: bool = True
    draining: bool = False
    cordons: Sequence[Cordoned] = ()
    engine: str | None
    pod: str | None = None
    node: str | None = None
    version: str | None = None
    engine_url: str | None = None
    takes_calls: bool = False
    block_size: int | None = None
    context_length: int | None = None
    engine_silent: bool = False
    several_engines: bool = False
    circuit: str = "closed"
    address: str = ""
    endpoint: str = ""
    domains: Mapping[str, str]
    levels: Sequence[str] = ()
    taints: Sequence[str] = ()
    prompt_tokens: PromptTokens = PromptTokens(min=None, max=None)
    event_lane: str | None = None
    kv_transfer: Policy | None = None
    kv_format: Mapping[str, str] = {}
    kv_partners: int | None = None
    ranks: Sequence[Rank]
    lapsed: bool = False

    @property
    def takes_requests(self) -> bool:
        """Whether the worker takes new requests."""
        gone = not self.alive or self.draining or self.engine_silent or self.cordons
        return not gone and self.circuit != "open"

    @property
    def prefills(self) -> bool:
        """Whether the worker's role includes prefill."""
        return self.role != Role.DECODE

    @property
    def decodes(self) -> bool:
        """Whether the worker's role includes decode."""
        return self.role != Role.PREFILL

    def __str__(self) -> str:
        """The worker's id, and the place or pod that an operator finds it by."""
        place = ", ".join(f"{domain}={value}" for domain, value in sorted(self.domains.items()))
        where = self.address if self.address.startswith("tcp") else ""
        about = [self.role, place, f"pod {self.pod}" if self.pod else where]
        return f"worker {self.worker_id} ({', '.join(each for each in about if each)})"


class RefusedWorker(Struct, frozen=True, kw_only=True):
    """An announced worker that the router refuses; ``field`` is the wrong field, None without one."""

    worker_id: int
    model: str
    role: RoleName
    address: str
    engine: str | None = None
    pod: str | None
    block_size: int | None
    field: str | None
    why: str

    def __str__(self) -> str:
        """The worker's id, role, and pod or address."""
        where = f"pod {self.pod}" if self.pod else self.address
        return f"worker {self.worker_id} ({self.role}, {where})"


class ExpectedState(StrEnum):
    """Whether an expected engine has a worker. ``awaited``: it did not answer yet; ``refused``: it answered,
    and contradicts what is asked for; ``joined``: it has a worker.
    """

    AWAITED = "awaited"
    REFUSED = "refused"
    JOINED = "joined"


ExpectedStateName = Annotated[str, Meta(extra_json_schema={"enum": [each.value for each in ExpectedState]})]


class ExpectedEngine(Struct, frozen=True, kw_only=True):
    """An engine that this process is to attach. ``written_at`` is where it is named, as
    ``workers[0].engine.url``; ``reason`` is why it has no worker, in the words of the log, or what is wrong
    with its URL; ``since_s`` is when the state began, in seconds since 1970. Unknown values are None.
    """

    written_at: str = ""
    engine_url: str | None = None
    worker_id: int | None = None
    kind: str | None = None
    role: RoleName | None = None
    model: str | None = None
    pod: str | None = None
    state: ExpectedStateName
    reason: str | None = None
    since_s: float | None = None

    @property
    def has_problem(self) -> bool:
        """Whether the engine has no worker, or something is wrong with its URL."""
        return self.state != ExpectedState.JOINED or self.reason is not None

    def __str__(self) -> str:
        """Where the engine is named, its URL, its state and the reason."""
        of = f" of {self.written_at}" if self.written_at else ""
        at = f" at {self.engine_url}" if self.engine_url else ""
        return f"the engine{of}{at} is {self.state}: {self.reason or 'no reason is known'}"


class Fleet(Struct, frozen=True, kw_only=True):
    """``GET /v1/fleet``. Fields that older routers omit are None."""

    version: str | None = None
    time_s: float | None = None
    discovery: Discovery = Discovery()
    draining: bool = False
    running_requests: int = 0
    request_stats: RequestStats | None = None
    recording: str | None = None
    replicas: Replicas | None = None
    models: Sequence[Model]
    workers: Sequence[Worker]
    refused_workers: Sequence[RefusedWorker] | None = None
    expected_engines: Sequence[ExpectedEngine] | None = None

    def workers_of(self, model: Model) -> list[Worker]:
        """The workers of one model."""
        return [worker for worker in self.workers if worker.model == model.model]


class Flow(Struct, frozen=True, kw_only=True):
    """KV handed over from one value of a domain to another."""

    model: str = ""
    domain: str | None
    prefill_value: str | None
    decode_value: str | None
    handoffs: int
    unsized_handoffs: int = 0
    bytes: int
    cost: float | None
    recent_handoffs: int = 0
    bytes_per_s: float


class Flows(Struct, frozen=True, kw_only=True):
    """``GET /v1/flows``; recent handoffs are those of the last ``recent_s`` seconds."""

    recent_s: float = 0.0
    flows: Sequence[Flow]


class RefusedRanks(Struct, frozen=True, kw_only=True):
    """How often ranks were refused for one reason."""

    reason: str
    role: str
    count: int


class RefusedAnswers(Struct, frozen=True, kw_only=True):
    """How many calls of a model were answered with one error code."""

    model: str
    code: str
    count: int


class Refusals(Struct, frozen=True, kw_only=True):
    """``GET /v1/refusals``: refusals since the process began."""

    worker_ranks: Sequence[RefusedRanks]
    answers: Sequence[RefusedAnswers]

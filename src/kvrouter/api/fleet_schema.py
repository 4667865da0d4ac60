"""``GET /v1/fleet``, ``/v1/flows`` and ``/v1/refusals``: workers and models, as a router sees them."""

from collections.abc import Mapping, Sequence
from typing import Annotated

from msgspec import Meta, Struct

from kvrouter.core.workers import Enforcement, Role

RoleName = Annotated[str, Meta(extra_json_schema={"enum": [each.value for each in Role]})]
EnforcementName = Annotated[str, Meta(extra_json_schema={"enum": [each.value for each in Enforcement]})]
"""A text that equals a member of the enumeration: a newer router may have more of them than its reader."""


class Policy(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How strictly KV keeps to a domain; ``weight`` is there where the domain is only preferred."""

    enforcement: EnforcementName
    domain: str
    weight: float | None = None


class Discovery(Struct, frozen=True, kw_only=True):
    """Whether discovery, or the store of cordons, can be reached."""

    reachable: bool = True
    why: str | None = None


class Replicas(Struct, frozen=True, kw_only=True):
    """Other routers that share what they book."""

    others: int
    behind: int


class PrefillNear(Struct, frozen=True, kw_only=True):
    """Where prefill keeps to; ``value`` is None while the frontend does not know its own place."""

    domain: str
    value: str | None
    required: bool


class BrokenPair(Struct, frozen=True, kw_only=True):
    """A pair whose KV was lost lately."""

    prefill_worker_id: int
    decode_worker_id: int
    circuit: str


class LearnedLink(Struct, frozen=True, kw_only=True):
    """A link, or a kind of link, as handoffs showed it; without ``slowness_interval`` nothing bounds it."""

    link: str
    latency_s: float = 0.0
    bandwidth_bytes_per_s: float
    slowness: float
    slowness_interval: tuple[float, float] | None = None
    transfers: int
    slow: bool


class EngineSums(Struct, frozen=True, kw_only=True):
    """What engines count of all transfers, against what the router sees."""

    bandwidth_bytes_per_s: float
    seen_bytes_per_s: float
    ratio: float
    agree: bool


class Links(Struct, frozen=True, kw_only=True):
    """What was learned of a model's links."""

    alike: bool = True
    engines: EngineSums | None
    learned: Sequence[LearnedLink]


class Index(Struct, frozen=True, kw_only=True):
    """The size of a model's index; ``blocks`` by medium."""

    blocks: Mapping[str, int]
    bytes: int


class PromptShape(Struct, frozen=True, kw_only=True):
    """Calls of one shape whose engines answered, and how many had another prompt than the router's."""

    shape: str
    answers: int
    missed: int
    blind: bool


class UnrenderedChats(Struct, frozen=True, kw_only=True):
    """Chats of a model that its router did not make into prompts, for one reason."""

    reason: str
    chats: int
    detail: str


class Model(Struct, frozen=True, kw_only=True):
    """A model that workers registered. ``routing_reason`` says why its calls are routed by load alone; None
    where they are not.
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
    router_pd_selection: str = ""
    links: Links | None = None
    workers: int = 0
    worker_ranks: int = 0
    waiting_requests: int = 0
    parted_pairs: Sequence[BrokenPair] = ()
    index: Index | None = None
    prompt_shapes: Sequence[PromptShape] = ()
    unrendered_chats: Sequence[UnrenderedChats] = ()
    kv_transfer_default: Policy | None = None
    active_decode_blocks_threshold: float | None = None
    active_prefill_tokens_threshold: int | None = None

    @property
    def hears_events(self) -> bool:
        """Whether the router learns from KV events what is cached where."""
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
    """A rank's last answers, against what the index had promised."""

    answers: int
    wrong: int
    wrong_share: float
    mean_error_blocks: float


class Speed(Struct, frozen=True, kw_only=True):
    """How fast a rank is: its slowness against its engine's timing, and against ranks that are like it."""

    slowness: float = 1.0
    decode_slowness: float = 1.0
    relative: float
    requests: int = 0
    predicted_ttft_s: float = 0.0
    seen_ttft_s: float = 0.0
    slow: bool


class Transfers(Struct, frozen=True, kw_only=True):
    """What a rank fetched from others, by its engine's own count."""

    transfers: int
    failed: int
    bytes: int = 0
    seconds: float = 0.0
    gb_per_s: float | None
    shown_gb_per_s: float | None
    slow: bool


class Rank(Struct, frozen=True, kw_only=True):
    """A rank of a worker. What is not known is None."""

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
    """A cordon; ``at`` is when it was made, None where nobody said."""

    level: str
    name: str
    reason: str | None = None
    by: str | None = None
    at: str | None = None
    source: str = "call"
    cluster: str | None = None

    @property
    def place(self) -> str:
        """What is cordoned."""
        return f"{self.level} {self.name}"


class PromptTokens(Struct, frozen=True, kw_only=True):
    """The shortest and the longest prompts that a worker is meant for; None where any is."""

    min: int | None
    max: int | None


class Worker(Struct, frozen=True, kw_only=True):
    """A worker. What it does not say is None."""

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
    circuit: str = "closed"
    address: str = ""
    endpoint: str = ""
    domains: Mapping[str, str]
    levels: Sequence[str] = ()
    taints: Sequence[str] = ()
    prompt_tokens: PromptTokens = PromptTokens(min=None, max=None)
    event_lane: str | None = None
    kv_transfer: Policy | None = None
    ranks: Sequence[Rank]
    lapsed: bool = False

    @property
    def takes_requests(self) -> bool:
        """Whether new requests may go there."""
        gone = not self.alive or self.draining or self.engine_silent or self.cordons
        return not gone and self.circuit != "open"

    @property
    def prefills(self) -> bool:
        """Whether prompts are prefilled there as a rule."""
        return self.role != Role.DECODE

    @property
    def decodes(self) -> bool:
        """Whether answers are decoded there."""
        return self.role != Role.PREFILL

    def __str__(self) -> str:
        """Its number, and where an operator finds it."""
        place = ", ".join(f"{domain}={value}" for domain, value in sorted(self.domains.items()))
        where = self.address if self.address.startswith("tcp") else ""
        about = [self.role, place, f"pod {self.pod}" if self.pod else where]
        return f"worker {self.worker_id} ({', '.join(each for each in about if each)})"


class RefusedWorker(Struct, frozen=True, kw_only=True):
    """A worker that is announced and cannot be routed to; ``field`` is what is wrong, None where none is."""

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
        """Its number, and where an operator finds it."""
        where = f"pod {self.pod}" if self.pod else self.address
        return f"worker {self.worker_id} ({self.role}, {where})"


class Fleet(Struct, frozen=True, kw_only=True):
    """``GET /v1/fleet``. What older routers do not say is None."""

    version: str | None = None
    time_s: float | None = None
    discovery: Discovery = Discovery()
    draining: bool = False
    running_requests: int = 0
    recording: str | None = None
    replicas: Replicas | None = None
    models: Sequence[Model]
    workers: Sequence[Worker]
    refused_workers: Sequence[RefusedWorker] | None = None

    def workers_of(self, model: Model) -> list[Worker]:
        """The workers of one model."""
        return [worker for worker in self.workers if worker.model == model.model]


class Flow(Struct, frozen=True, kw_only=True):
    """KV between two values of a domain."""

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
    """``GET /v1/flows``; what is recent was handed over in the last ``recent_s`` seconds."""

    recent_s: float = 0.0
    flows: Sequence[Flow]


class RefusedRanks(Struct, frozen=True, kw_only=True):
    """How often ranks were refused for one reason."""

    reason: str
    role: str
    count: int


class RefusedAnswers(Struct, frozen=True, kw_only=True):
    """How many calls of a model were answered with one error."""

    model: str
    code: str
    count: int


class Refusals(Struct, frozen=True, kw_only=True):
    """``GET /v1/refusals``: what was refused since the process began."""

    worker_ranks: Sequence[RefusedRanks]
    answers: Sequence[RefusedAnswers]

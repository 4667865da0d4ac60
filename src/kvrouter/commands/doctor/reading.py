"""One reading of a fleet: what its router says over HTTP, and what its engines say."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from kvrouter.core.constraints import RouterMode
from kvrouter.core.workers import Enforcement, Role
from kvrouter.engines.openai.metrics import Samples

COUNTERS = (
    "kvrouter_requests_total",
    "kvrouter_errors_total",
    "kvrouter_prompt_tokens_total",
    "kvrouter_cached_tokens_total",
    "kvrouter_overlap_tokens_total",
    "kvrouter_time_to_first_token_by_cache_hit_seconds_count",
    "kvrouter_index_predictions_total",
    "kvrouter_prompt_shape_answers_total",
    "kvrouter_events_dropped_total",
    "kvrouter_planes_refused_total",
    "kvrouter_feed_events_total",
    "kvrouter_handoffs_total",
    "kvrouter_fallbacks_total",
    "kvrouter_kv_lost_total",
    "kvrouter_queue_refusals_total",
    "kvrouter_prompts_refused_total",
    "kvrouter_http_events_total",
    "kvrouter_replica_sync_events_total",
    "kvrouter_recording_dropped_total",
    "kvrouter_refusals_total",
)
"""The counts that are read of a router's metrics; with two readings, what came between them."""

GAUGES = (
    "kvrouter_engines_awaited",
    "kvrouter_worker_prompt_tokens_total",
    "kvrouter_worker_requests_total",
)
"""What is read as it is: of a worker's prompts all, because what it reported does not come again."""


class Discovery(msgspec.Struct, frozen=True):
    """Whether discovery can be reached."""

    reachable: bool
    why: str | None = None


class Replicas(msgspec.Struct, frozen=True):
    """Other routers that share what they book."""

    others: int
    behind: int


class PrefillNear(msgspec.Struct, frozen=True):
    """Where prefill keeps to; ``value`` is None while the frontend does not know its own place."""

    domain: str
    value: str | None
    required: bool


class Policy(msgspec.Struct, frozen=True):
    """A transfer policy."""

    enforcement: Enforcement
    domain: str


class BrokenPair(msgspec.Struct, frozen=True):
    """A pair whose KV was lost lately."""

    prefill_worker_id: int
    decode_worker_id: int
    circuit: str


class LearnedLink(msgspec.Struct, frozen=True):
    """A link, or a kind of link, as handoffs showed it."""

    link: str
    bandwidth_bytes_per_s: float
    slowness: float
    transfers: int
    slow: bool


class EngineSums(msgspec.Struct, frozen=True):
    """What engines count of all transfers, against what the router sees."""

    bandwidth_bytes_per_s: float
    seen_bytes_per_s: float
    ratio: float
    agree: bool


class Links(msgspec.Struct, frozen=True):
    """What was learned of a model's links."""

    engines: EngineSums | None
    learned: Sequence[LearnedLink]


class UnrenderedChats(msgspec.Struct, frozen=True):
    """Chats of a model that its router did not make into prompts, for one reason."""

    reason: str
    chats: int
    detail: str


class Model(msgspec.Struct, frozen=True):
    """A model that workers registered."""

    model: str
    block_size: int
    router_mode: RouterMode
    router_cost: str
    links: Links | None
    waiting_requests: int
    parted_pairs: Sequence[BrokenPair]
    kv_transfer_default: Policy | None
    active_decode_blocks_threshold: float | None
    active_prefill_tokens_threshold: int | None
    cache_view: str | None = None
    routing_reason: str | None = None
    """Why its calls are routed by load alone; None where they are not."""
    tokenized_by: str | None = None
    prefill_near: PrefillNear | None = None
    unrendered_chats: Sequence[UnrenderedChats] = ()

    @property
    def hears_events(self) -> bool:
        """Whether the router learns from KV events what is cached where."""
        return self.cache_view == "events"


class LoadSeen(msgspec.Struct, frozen=True):
    """A rank's own load report."""

    active_blocks: int
    active_prefill_tokens: int | None
    running_requests: int
    waiting_requests: int


class Feed(msgspec.Struct, frozen=True):
    """A rank's event stream."""

    state: str
    stale_s: float
    silent_s: float
    kv_events_missing: bool | None
    clock_ahead_s: float | None = None


class Predictions(msgspec.Struct, frozen=True):
    """A rank's last answers, against what the index had promised."""

    answers: int
    wrong: int
    wrong_share: float
    mean_error_blocks: float


class Speed(msgspec.Struct, frozen=True):
    """How fast a rank is."""

    relative: float
    slow: bool


class Transfers(msgspec.Struct, frozen=True):
    """What a rank fetched from others, by its engine's own count."""

    transfers: int
    failed: int
    gb_per_s: float | None
    shown_gb_per_s: float | None
    slow: bool


class Rank(msgspec.Struct, frozen=True):
    """A rank of a worker."""

    dp_rank: int
    prefill_tokens: int
    active_blocks: int
    total_blocks: int | None
    report: LoadSeen | None
    index_blocks: int | None
    feed: Feed | None
    kv_events_skipped: Mapping[str, int] | None
    predictions: Predictions | None
    speed: Speed | None
    kv_transfers: Transfers | None


class Cordoned(msgspec.Struct, frozen=True):
    """A cordon that holds for a worker."""

    level: str
    name: str
    reason: str | None = None
    by: str | None = None


class Worker(msgspec.Struct, frozen=True):
    """A worker."""

    worker_id: int
    model: str
    role: Role
    alive: bool
    draining: bool
    lapsed: bool
    engine: str | None
    engine_silent: bool
    pod: str | None
    circuit: str
    address: str
    domains: Mapping[str, str]
    event_lane: str | None
    kv_transfer: Policy | None
    ranks: Sequence[Rank]
    version: str | None = None
    engine_url: str | None = None
    takes_calls: bool = False
    block_size: int | None = None
    context_length: int | None = None
    cordons: Sequence[Cordoned] = ()

    @property
    def takes_requests(self) -> bool:
        """Whether new requests may go there."""
        gone = not self.alive or self.draining or self.engine_silent or self.cordons
        return not gone and self.circuit != "open"

    @property
    def prefills(self) -> bool:
        """Whether prompts are prefilled there as a rule."""
        return self.role is not Role.DECODE

    @property
    def decodes(self) -> bool:
        """Whether answers are decoded there."""
        return self.role is not Role.PREFILL

    def __str__(self) -> str:
        """Its number, and where an operator finds it."""
        place = ", ".join(f"{domain}={value}" for domain, value in sorted(self.domains.items()))
        where = self.address if self.address.startswith("tcp") else ""
        about = [self.role.value, place, f"pod {self.pod}" if self.pod else where]
        return f"worker {self.worker_id} ({', '.join(each for each in about if each)})"


class RefusedWorker(msgspec.Struct, frozen=True):
    """A worker that is announced and cannot be routed to."""

    worker_id: int
    model: str
    role: Role
    address: str
    pod: str | None
    block_size: int
    field: str | None
    why: str

    def __str__(self) -> str:
        """Its number, and where an operator finds it."""
        where = f"pod {self.pod}" if self.pod else self.address
        return f"worker {self.worker_id} ({self.role.value}, {where})"


class Fleet(msgspec.Struct, frozen=True):
    """``GET /v1/fleet``. What older routers do not say is None."""

    discovery: Discovery
    draining: bool
    models: Sequence[Model]
    workers: Sequence[Worker]
    version: str | None = None
    time_s: float | None = None
    recording: str | None = None
    replicas: Replicas | None = None
    refused_workers: Sequence[RefusedWorker] | None = None

    def workers_of(self, model: Model) -> list[Worker]:
        """The workers of one model."""
        return [worker for worker in self.workers if worker.model == model.model]


def policies_of(model: Model, workers: Iterable[Worker]) -> list[Policy]:
    """Return the transfer policies that hold for a model's KV, without repetition."""
    found = [worker.kv_transfer for worker in workers if worker.kv_transfer is not None]
    return list(dict.fromkeys((*found, *([model.kv_transfer_default] if model.kv_transfer_default else []))))


@dataclass(frozen=True, slots=True)
class Counts:
    """The counts of a router's metrics page: since it began, or between two readings."""

    samples: Samples = field(default_factory=dict)
    before: Samples = field(default_factory=dict)

    def total(self, name: str, **labels: str) -> float:
        """Return the sum of the samples that carry these labels."""
        return sum(value for _, value in self.of(name, **labels))

    def by(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """Return the sums by the values of one label, without those of nothing, the largest first."""
        sums: dict[str, float] = {}
        for carried, value in self.of(name, **labels):
            key = carried.get(label, "")
            sums[key] = sums.get(key, 0.0) + value
        return dict(sorted(((key, n) for key, n in sums.items() if n), key=lambda each: -each[1]))

    def of(self, name: str, **labels: str) -> Iterator[tuple[Mapping[str, str], float]]:
        """Yield each sample that carries these labels. One that became less is that of a restarted router."""
        was = {frozenset(sample.labels.items()): sample.value for sample in self.before.get(name, ())}
        for sample in self.samples.get(name, ()):
            if labels.items() <= sample.labels.items():
                before = was.get(frozenset(sample.labels.items()), 0.0)
                yield sample.labels, sample.value - before if sample.value >= before else sample.value


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReading:
    """What the engine of a worker says of itself now. ``why`` says why it could not be asked, where that is
    so; ``model`` is its own name of what it serves; ``clock_ahead_s`` is how far its clock is ahead of the
    router's, None where it does not say the time.
    """

    worker_id: int
    why: str | None = None
    version: str | None = None
    model: str | None = None
    block_size: int | None = None
    warnings: Sequence[str] = ()
    clock_ahead_s: float | None = None


@dataclass(frozen=True, slots=True)
class TokenProbe:
    """The token ids that the router and a worker's engine made of one text. None: it was not asked, and
    ``why`` says the reason.
    """

    model: str
    worker_id: int | None
    is_chat: bool
    router: Sequence[int] | None
    engine: Sequence[int] | None
    why: str | None = None


@dataclass(frozen=True, slots=True)
class OtherRouter:
    """Another router of the same fleet; ``fleet`` is None where it could not be asked, ``why`` says why."""

    url: str
    fleet: Fleet | None
    why: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """All that was asked. ``engines`` are by their workers; ``engines_asked`` False: nobody wanted them to be
    asked.
    """

    url: str
    fleet: Fleet
    served: frozenset[str]
    counts: Counts
    gauges: Counts
    over_s: float | None = None
    engines_asked: bool = True
    engines: Mapping[int, EngineReading] = field(default_factory=dict)
    probes: Sequence[TokenProbe] = ()
    others: Sequence[OtherRouter] = ()

    @property
    def period(self) -> str:
        """The time over which counts were taken, in words."""
        return "since the router began" if self.over_s is None else f"in {self.over_s:g} s"

    def engine_of(self, worker: Worker) -> EngineReading | None:
        """What a worker's engine says; None where it was not asked, or did not answer."""
        engine = self.engines.get(worker.worker_id)
        return None if engine is None or engine.why is not None else engine


def counted(n: float, noun: str) -> str:
    """Return a number with its noun, in the plural where it needs one."""
    return f"{n:,.0f} {noun}{'' if n == 1 else 's'}"


T = TypeVar("T")


def first_of(values: Iterable[T], n: int = 5) -> str:
    """Return the first of some values, and how many more there are."""
    shown = [str(value) for value in values]
    more = f" and {len(shown) - n} more" if len(shown) > n else ""
    return ", ".join(shown[:n]) + more

"""One reading of a fleet: its router's answers over HTTP, and those of its engines."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from kvrouter.api.fleet_schema import Fleet, Model, Policy, Worker
from kvrouter.core.workers import Role
from kvrouter.engines.openai.metrics import Samples

COUNTERS = (
    "kvrouter_requests_total",
    "kvrouter_errors_total",
    "kvrouter_prompt_tokens_total",
    "kvrouter_cached_tokens_total",
    "kvrouter_cache_reports_total",
    "kvrouter_cache_reported_prompt_tokens_total",
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
    "kvrouter_worker_failures_total",
)
"""The counts that are read of a router's metrics; with two readings, what came between them."""

GAUGES = (
    "kvrouter_worker_prompt_tokens_total",
    "kvrouter_worker_requests_total",
)
"""Metrics that are read as they are: all prompts of a worker, because its reports do not come again."""


ANSWERS_COMPARED = 8
"""So many compared answers say something."""


def policies_of(model: Model, workers: Iterable[Worker]) -> list[Policy]:
    """Return the transfer policies that hold for a model's KV; weights do not distinguish them."""
    found = [worker.kv_transfer for worker in workers] + [model.kv_transfer_default]
    of_all = {(policy.enforcement, policy.domain): policy for policy in found if policy is not None}
    return list(of_all.values())


@dataclass(frozen=True, slots=True)
class Counts:
    """The counts of a router's metrics page: since it began, or between two readings."""

    samples: Samples = field(default_factory=dict)
    before: Samples = field(default_factory=dict)

    def total(self, name: str, **labels: str) -> float:
        """Return the sum of the samples that carry these labels."""
        return sum(value for _, value in self.of(name, **labels))

    def by(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """Return the sums by the values of one label, without those of 0, the largest first."""
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
    """The values of a worker's engine now. ``why`` is the reason if it could not be asked; ``model`` is its
    own name of its model; ``clock_ahead_s`` is how far its clock is ahead of the router's, None if unknown.
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
    """The token ids of one text by the router and by a worker's engine; None: not asked, for the reason
    ``why``.
    """

    model: str
    worker_id: int | None
    is_chat: bool
    router: Sequence[int] | None
    engine: Sequence[int] | None
    why: str | None = None

    @property
    def is_made(self) -> bool:
        """Whether both were asked."""
        return self.router is not None and self.engine is not None

    @property
    def is_equal(self) -> bool:
        """Whether both make the same tokens."""
        return self.router is not None and self.engine is not None and [*self.router] == [*self.engine]


@dataclass(frozen=True, slots=True)
class OtherRouter:
    """Another router of the same fleet; ``fleet`` is None if it was not asked, for the reason ``why``."""

    url: str
    fleet: Fleet | None
    why: str | None = None


@dataclass(frozen=True, slots=True)
class Accepting:
    """A router's answer to ``/accepting``; ``why_not`` is None while it takes requests. A router that
    ``is_asked`` is False for did not answer, or is too old for the route.
    """

    url: str
    is_asked: bool = True
    why_not: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """All answers. ``engines`` are by worker; ``engines_asked`` is False if they were not to be asked."""

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
    accepting: Sequence[Accepting] = ()

    @property
    def period(self) -> str:
        """The period of the counts, in words."""
        return "since the router began" if self.over_s is None else f"in {self.over_s:g} s"

    @property
    def workers_compared(self) -> str:
        """The number of workers, which most checks look at."""
        return counted(len(self.fleet.workers), "worker")

    @property
    def hands_over(self) -> bool:
        """Whether KV goes from one worker to another at all."""
        return any(worker.role == Role.PREFILL for worker in self.fleet.workers)

    def engine_of(self, worker: Worker) -> EngineReading | None:
        """Return the reading of a worker's engine; None if it was not asked, or did not answer."""
        engine = self.engines.get(worker.worker_id)
        return None if engine is None or engine.why is not None else engine


def counted(n: float, noun: str) -> str:
    """Return a number with its noun, in the plural where it needs one."""
    return f"{n:,.0f} {noun}{'' if n == 1 else 's'}"


T = TypeVar("T")


def first_of(values: Iterable[T], n: int = 5) -> str:
    """Return the first of some values, and the number of further ones."""
    shown = [str(value) for value in values]
    more = f" and {len(shown) - n} more" if len(shown) > n else ""
    return ", ".join(shown[:n]) + more

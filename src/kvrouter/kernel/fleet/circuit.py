"""Circuit breakers for workers, and for prefill and decode pairs.

::

    CLOSED ── so many failures in a row ──▶ OPEN ── a while ──▶ HALF_OPEN ── one request ──▶ CLOSED
                                             ▲                      │
                                             └── it failed: longer ─┘

Two kinds of consecutive failures are counted: legs that failed before their first output, until a leg has
output; and answers that broke off, until an answer completes. All times are seconds of one monotonic clock.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from math import inf
from typing import NamedTuple

from kvrouter.core.backoff import Backoff
from kvrouter.core.hashing import mix64
from kvrouter.core.ids import WorkerId

JITTER = 0.25
"""The largest random reduction of an open time, so that routers do not all try a worker at once."""


class CircuitState(StrEnum):
    """The requests that a circuit allows: all, none, or one at a time."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


HEALTHY_S = 30.0
"""A worker counts as healthy for this long after it last had output, even if single requests fail. Failures
of requests that other workers fail too count only after the worker has failed without any output for this
long."""


class Suspicion(Enum):
    """The certainty that a failed leg is its worker's fault and not its request's."""

    SURE = auto()
    """Another worker served the same request, or the request did not reach the engine."""
    ALONE = auto()
    """No other worker had the request: the failure counts only if the worker is not healthy."""
    SHARED = auto()
    """Other workers failed the request too: it counts only if the worker has long had only failures."""


class Fault(StrEnum):
    """The kind of a failure that counts against a worker or a pair."""

    LOST = "lost"
    """The leg could not be sent, the engine answered with a failure, or the answer broke off."""
    SILENT = "silent"
    """The leg had no output in time."""
    KV_LOST = "kv_lost"
    """The KV of a pair's prefill worker did not reach its decode worker."""
    CANNOT_TRANSFER = "cannot_transfer"
    """The engines of a pair refuse each other: its KV is lost for as long as they run."""


@dataclass(frozen=True, slots=True)
class CircuitSettings:
    """``failures`` in a row open a circuit, for ``open_s`` seconds at first; the time doubles each time the
    half-open request fails too, up to ``open_max_s``.
    """

    failures: int
    open_s: float
    open_max_s: float


class Circuit:
    """The circuit breaker of one worker or one pair. ``seed`` determines the jitter."""

    __slots__ = (
        "_broken",
        "_failed_s",
        "_failing_since_s",
        "_is_probed",
        "_open_until_s",
        "_opened",
        "_opened_s",
        "_seed",
        "_settings",
        "_unanswered",
        "begun_s",
    )

    def __init__(self, settings: CircuitSettings, *, now_s: float, seed: int) -> None:
        self._settings = settings
        self._seed = seed
        self._unanswered = 0
        self._broken = 0
        self._opened = 0
        self._opened_s = now_s
        """When the circuit last opened. Failures of legs that were sent earlier do not count again."""
        self._open_until_s: float | None = None
        self._is_probed = False
        self.begun_s = -inf
        """When a leg last had output."""
        self._failed_s = -inf
        self._failing_since_s = inf
        """When the first leg failed since the last output; ``inf`` if none did."""

    def state(self, now_s: float) -> CircuitState:
        """Return the state at ``now_s``."""
        if self._open_until_s is None:
            return CircuitState.CLOSED
        return CircuitState.OPEN if now_s < self._open_until_s else CircuitState.HALF_OPEN

    def allows_request(self, now_s: float) -> bool:
        """Whether a request may be sent now; a half-open circuit allows one at a time."""
        if self._open_until_s is None:
            return True
        return now_s >= self._open_until_s and not self._is_probed

    @property
    def half_open_s(self) -> float | None:
        """When the circuit becomes or became half open; None while it is closed."""
        return self._open_until_s

    def take(self, now_s: float) -> bool:
        """Record that a request is sent. Return whether it is the single request of a half-open circuit: its
        sender then calls :meth:`give_back`.
        """
        if self._open_until_s is None or not self.allows_request(now_s):
            return False
        self._is_probed = True
        return True

    def give_back(self) -> None:
        """Release the single request of a half-open circuit: it reported its outcome, or never will."""
        self._is_probed = False

    def begun(self, now_s: float) -> bool:
        """Record a leg's first output at ``now_s``, which closes the circuit unless a failure came after it.
        Return whether it closed it.
        """
        if now_s < self._failed_s:
            return False
        was_open = self._open_until_s is not None
        self._open_until_s = None
        self._unanswered = 0
        self.begun_s = now_s
        self._failing_since_s = inf
        return was_open

    def ended(self) -> None:
        """Record a complete answer: earlier broken answers no longer count."""
        self._broken = 0
        self._opened = 0

    def suspect(self, failed_s: float) -> None:
        """Record a failed leg before it is known whether the worker or the request is at fault."""
        self._failing_since_s = min(self._failing_since_s, failed_s)

    def counts(self, suspicion: Suspicion, now_s: float) -> bool:
        """Whether a failure with this certainty counts against the worker."""
        if suspicion is Suspicion.ALONE:
            return now_s - self.begun_s >= HEALTHY_S
        return suspicion is Suspicion.SURE or now_s - self._failing_since_s >= HEALTHY_S

    def failed(
        self, now_s: float, fault: Fault, *, since_s: float, has_begun: bool, failed_s: float | None = None
    ) -> bool:
        """Count a failed leg; return whether that opened the circuit.

        ``since_s`` is when the leg was sent, or since when it has been silent; ``failed_s`` is when it
        failed, if it is counted later than that. Legs that were in flight when another one failed count as
        the same failure; silence counts each time. Silence and late-counted failures count only if no leg had
        output since: a worker that is slow with one request may be busy with others.
        """
        failed_s = now_s if failed_s is None else failed_s
        if self.state(now_s) is CircuitState.OPEN or since_s < self._opened_s or failed_s < self.begun_s:
            return False
        if since_s < (self.begun_s if fault is Fault.SILENT else self._failed_s):
            return False
        self._failed_s = max(self._failed_s, failed_s)
        if has_begun:
            self._broken += 1
        else:
            self._unanswered += 1
        if self._open_until_s is None and max(self._broken, self._unanswered) < self._settings.failures:
            return False
        self._open(now_s)
        return True

    def _open(self, now_s: float) -> None:
        settings = self._settings
        self._opened += 1
        open_s = Backoff(settings.open_s, settings.open_max_s).delay_s(self._opened)
        share = (mix64(self._seed + self._opened) >> 11) * 2.0**-53
        self._opened_s = now_s
        self._open_until_s = now_s + open_s * (1.0 - JITTER * share)


class Pair(NamedTuple):
    """A prefill worker and the decode worker that receives its KV."""

    prefill: WorkerId
    decode: WorkerId


class BrokenPairs:
    """The pairs of workers between which KV was lost lately."""

    def __init__(self) -> None:
        self._of: dict[WorkerId, set[WorkerId]] = {}
        self.aggregated_failed = False
        """Whether the last request that ran aggregated because every pair was broken failed too: while pairs
        are broken, pairs are then tried again instead.
        """

    def copy(self) -> "BrokenPairs":
        """Return a copy of the pairs."""
        copied = BrokenPairs()
        copied._of = {prefill: set(decodes) for prefill, decodes in self._of.items()}
        copied.aggregated_failed = self.aggregated_failed
        return copied

    def __bool__(self) -> bool:
        return bool(self._of)

    def __iter__(self) -> Iterator[Pair]:
        return (Pair(prefill, decode) for prefill, decodes in self._of.items() for decode in decodes)

    def senders(self) -> Iterable[WorkerId]:
        """Return the prefill workers of all broken pairs."""
        return self._of.keys()

    def of(self, prefill: WorkerId) -> frozenset[WorkerId]:
        """Return the decode workers that form a broken pair with this prefill worker."""
        return frozenset(self._of.get(prefill, ()))

    def put(self, prefill: WorkerId, decode: WorkerId, is_broken: bool) -> bool:
        """Set whether a pair is broken; return whether that changed."""
        decodes = self._of.get(prefill, set())
        if (decode in decodes) == is_broken:
            return False
        if is_broken:
            self._of.setdefault(prefill, set()).add(decode)
        else:
            decodes.discard(decode)
            if not decodes:
                del self._of[prefill]
                self.aggregated_failed = self.aggregated_failed and bool(self._of)
        return True

"""Circuit breakers for workers, and for prefill and decode pairs.

::

    CLOSED ── so many failures in a row ──▶ OPEN ── a while ──▶ HALF_OPEN ── one request ──▶ CLOSED
                                             ▲                      │
                                             └── it failed: longer ─┘

Two things count, each in a row: legs that brought nothing, until one brings something; and answers that broke
off, until one comes to its end. All moments are on one monotonic clock, in seconds.
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
"""By how much of its time a circuit may close earlier, so that routers do not try a worker all at once."""


class CircuitState(StrEnum):
    """What a circuit lets through: everything, nothing, or one request."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


WELL_S = 30.0
"""For how long a worker that brought something is well, whatever it answers to one request. So long it has to
fail requests that others fail too, and to bring nothing to anybody, before it is at fault itself."""


class Suspicion(Enum):
    """How sure it is that a failed leg is its worker's fault, and not its request's."""

    SURE = auto()
    """Another worker did what this one failed, or its request did not get as far as its engine."""
    ALONE = auto()
    """No other was given it: it counts for a worker that is not well."""
    SHARED = auto()
    """Others that were given it failed too: it counts for a worker that long did nothing else."""


class Fault(StrEnum):
    """How a leg failed that its worker is to blame for."""

    LOST = "lost"
    """It could not be sent, the engine answered that it failed, or the answer broke off."""
    SILENT = "silent"
    """Nothing came of it in time."""
    KV_LOST = "kv_lost"
    """Of a pair: the KV of the one did not reach the other."""


@dataclass(frozen=True, slots=True)
class CircuitSettings:
    """``failures`` in a row open a circuit, for ``open_s`` seconds at first; each time that the next request
    fails too it is twice as long, up to ``open_max_s``.
    """

    failures: int
    open_s: float
    open_max_s: float


class Circuit:
    """The circuit of one worker, or of one pair. ``seed`` draws the jitter."""

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
        """Legs that were sent before this are not counted: they belong to what came before."""
        self._open_until_s: float | None = None
        self._is_probed = False
        self.begun_s = -inf
        """When a leg last brought something."""
        self._failed_s = -inf
        self._failing_since_s = inf
        """When the first leg failed since one brought something."""

    def state(self, now_s: float) -> CircuitState:
        """Return what it lets through."""
        if self._open_until_s is None:
            return CircuitState.CLOSED
        return CircuitState.OPEN if now_s < self._open_until_s else CircuitState.HALF_OPEN

    def lets_in(self, now_s: float) -> bool:
        """Whether a request may be sent there: of a circuit that is half open, one at a time."""
        if self._open_until_s is None:
            return True
        return now_s >= self._open_until_s and not self._is_probed

    @property
    def half_open_s(self) -> float | None:
        """When it will be, or became, half open; None while it is closed."""
        return self._open_until_s

    def take(self, now_s: float) -> bool:
        """A request is sent there. True where it is the one that a half-open circuit lets through: the
        sender gives it back.
        """
        if self._open_until_s is None or not self.lets_in(now_s):
            return False
        self._is_probed = True
        return True

    def give_back(self) -> None:
        """The one request has reported its outcome, or will report none."""
        self._is_probed = False

    def begun(self, now_s: float) -> bool:
        """A leg brought something: the circuit closes. True where it was not closed."""
        was_open = self._open_until_s is not None
        self._open_until_s = None
        self._unanswered = 0
        self.begun_s = now_s
        self._failing_since_s = inf
        return was_open

    def ended(self) -> None:
        """An answer came to its end: those that broke off before do not count any more."""
        self._broken = 0
        self._opened = 0

    def suspect(self, failed_s: float) -> None:
        """A leg failed; whose fault that is may only show later."""
        self._failing_since_s = min(self._failing_since_s, failed_s)

    def counts(self, suspicion: Suspicion, now_s: float) -> bool:
        """Whether a failure that is so surely the worker's counts against it."""
        if suspicion is Suspicion.ALONE:
            return now_s - self.begun_s >= WELL_S
        return suspicion is Suspicion.SURE or now_s - self._failing_since_s >= WELL_S

    def failed(
        self, now_s: float, fault: Fault, *, since_s: float, has_begun: bool, failed_s: float | None = None
    ) -> bool:
        """A leg failed; return whether that opened the circuit.

        ``since_s`` is when it was sent, or since when it has been silent; ``failed_s`` is when it failed,
        where that counts only now. Legs that were under way when another one failed are one failure with it:
        they break together. Silence counts each time. It, and what counts later, do so only where nobody was
        brought anything since: a worker that is slow with one request may be at work.
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
    """A prefill worker, and a decode worker that its KV goes to."""

    prefill: WorkerId
    decode: WorkerId


class BrokenPairs:
    """Prefill workers, and the decode workers that their KV does not reach."""

    def __init__(self) -> None:
        self._of: dict[WorkerId, set[WorkerId]] = {}
        self.whole_failed = False
        """Whether one worker alone failed with the last request that it was given because every pair was
        broken: then pairs are the better try, for as long as any is broken.
        """

    def __bool__(self) -> bool:
        return bool(self._of)

    def __iter__(self) -> Iterator[Pair]:
        return (Pair(prefill, decode) for prefill, decodes in self._of.items() for decode in decodes)

    def senders(self) -> Iterable[WorkerId]:
        """Return the prefill workers whose KV does not reach somebody."""
        return self._of.keys()

    def of(self, prefill: WorkerId) -> frozenset[WorkerId]:
        """Return the decode workers that KV of this prefill worker does not reach."""
        return frozenset(self._of.get(prefill, ()))

    def put(self, prefill: WorkerId, decode: WorkerId, is_broken: bool) -> bool:
        """Note it; return whether it is news."""
        decodes = self._of.get(prefill, set())
        if (decode in decodes) == is_broken:
            return False
        if is_broken:
            self._of.setdefault(prefill, set()).add(decode)
        else:
            decodes.discard(decode)
            if not decodes:
                del self._of[prefill]
                self.whole_failed = self.whole_failed and bool(self._of)
        return True

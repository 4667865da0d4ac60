"""Stall watch: limits a request's time to prefill, first token and end, and the silence between tokens."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from math import inf

from kvrouter.transports.background import LATE_S, DueTimes

READ_S = 1.0
"""The least time to read what arrived while the event loop was late, in seconds."""


class TooLong(Enum):
    """Which limit was reached."""

    REQUEST = auto()
    """The time for the whole request."""
    PREFILL = auto()
    """The time for the prefill leg of a pair, which ends before decode begins."""
    FIRST_TOKEN = auto()
    """The time to the client's first token."""
    SILENCE = auto()
    """The time without a token from a worker that resumes or streams; another worker may take over."""


class Phase(Enum):
    """What the request waits for."""

    FIRST_TOKEN = auto()
    PREFILLING = auto()
    """The first token, while the prefill leg of a pair runs before the decode leg."""
    RESUMING = auto()
    """The client has tokens, and another worker prefills in order to resume."""
    STREAMING = auto()


_FIRST_TOKEN, _PREFILLING, _RESUMING, _STREAMING = Phase
"""Constants, because access to an enumeration's members is slow before Python 3.12."""

_KIND_OF = {
    _FIRST_TOKEN: TooLong.FIRST_TOKEN,
    _PREFILLING: TooLong.PREFILL,
    _RESUMING: TooLong.SILENCE,
    _STREAMING: TooLong.SILENCE,
}
"""The limit of each phase."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """A request's limits in seconds: to the end of its prefill leg, to its first token, between tokens before
    the worker counts as lost, and to its end.
    """

    prefill_s: float
    first_token_s: float
    between_tokens_s: float
    request_s: float


class StallWatch:
    """Calls ``on_too_long`` once each time a limit is reached. All times are on the monotonic clock. One
    ``due_times`` checks the watches of all requests.

    Time that the client takes to read, from :meth:`pause` to :meth:`resume`, does not count as a worker's
    silence. Neither does time in which this process was paused: messages that arrived meanwhile wait to be
    read. A silence is prolonged for that once, so that it ends on an event loop that is always late.
    """

    __slots__ = (
        "_began_s",
        "_due_times",
        "_on_too_long",
        "_paused_s",
        "_prolonged_s",
        "_timeouts",
        "phase",
        "progress_s",
    )

    def __init__(
        self, timeouts: Timeouts, due_times: "StallTimes", on_too_long: Callable[[TooLong, float], None]
    ) -> None:
        self._timeouts = timeouts
        self._due_times = due_times
        self._on_too_long = on_too_long
        self._began_s = self.progress_s = time.monotonic()
        self._paused_s: float | None = None
        """Since when the client has held the last chunk; None while a worker is awaited."""
        self._prolonged_s = -inf
        """When a silence was last prolonged because this process had been paused."""
        self.phase = _FIRST_TOKEN

    @property
    def time_left_s(self) -> float:
        """Seconds that the request may still take."""
        return max(0.0, self._began_s + self._timeouts.request_s - time.monotonic())

    def enter(self, phase: Phase) -> None:
        """Enter a phase; its limits count from now."""
        self.phase = phase
        self.progress_s = time.monotonic()
        self._paused_s = self.progress_s if phase is _STREAMING else None
        self._due_times.put(self, self._due_s())

    def pause(self) -> None:
        """Note that the client has the last chunk."""
        self._paused_s = time.monotonic()

    def resume(self, *, progressed: bool) -> None:
        """Wait for a worker again. ``progressed``: the last chunk showed that it is at work."""
        now_s = time.monotonic()
        self._leave_out_client(now_s)
        self._paused_s = None
        if progressed:
            self.progress_s = now_s

    def _leave_out_client(self, now_s: float) -> None:
        if self._paused_s is not None:
            self.progress_s += now_s - self._paused_s
            self._paused_s = now_s

    def stop(self) -> None:
        """Stop the watch and drop the callback, so that the request can be freed."""
        self._due_times.drop(self)
        self._on_too_long = _no_callback

    def _due_s(self) -> float:
        """When the next limit is reached."""
        timeouts, phase = self._timeouts, self.phase
        if phase is _FIRST_TOKEN:
            limit_s = self._began_s + timeouts.first_token_s
        elif phase is _PREFILLING:
            limit_s = self._began_s + timeouts.prefill_s
        elif phase is _RESUMING:
            limit_s = self.progress_s + timeouts.first_token_s
        else:
            limit_s = self.progress_s + timeouts.between_tokens_s
        return min(limit_s, self._began_s + timeouts.request_s)

    def _kind_at(self, due_s: float) -> TooLong:
        is_end = due_s >= self._began_s + self._timeouts.request_s
        return TooLong.REQUEST if is_end else _KIND_OF[self.phase]

    def check(self, now_s: float, late_s: float) -> float | None:
        """Report a limit that is reached; return when to check again. ``late_s``: how late the check is."""
        self._leave_out_client(now_s)
        due_s = self._due_s()
        is_silence = self._kind_at(due_s) is TooLong.SILENCE
        if is_silence and late_s > LATE_S and self.progress_s > self._prolonged_s:
            self._prolonged_s = now_s
            # add the pause, and as much again to read what arrived meanwhile
            self.progress_s = min(now_s, self.progress_s + late_s + max(late_s, READ_S))
            due_s = self._due_s()
        if now_s < due_s:
            return due_s
        self._on_too_long(self._kind_at(due_s), now_s - self.progress_s)
        return None


StallTimes = DueTimes[StallWatch]


def _no_callback(_kind: TooLong, _silent_s: float) -> None:
    """Do nothing: the watch has been stopped."""

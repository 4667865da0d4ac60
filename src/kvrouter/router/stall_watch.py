"""Watches how long one request takes: to its prefill, its first token and its end, and between tokens."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

LATE_S = 0.1
"""A check that comes so much too late shows that this process stood still, not that a worker is silent."""


class TooLong(Enum):
    """What took too long."""

    REQUEST = auto()
    """The request as a whole."""
    PREFILL = auto()
    """The prefill leg of a pair, before the one that answers."""
    FIRST_TOKEN = auto()
    """The client's first token."""
    SILENCE = auto()
    """A worker that should go on with an answer: another one may."""


class Phase(Enum):
    """What is waited for."""

    FIRST_TOKEN = auto()
    PREFILLING = auto()
    """The same, and the prefill leg of a pair goes before the one that answers."""
    RESUMING = auto()
    """The client has tokens, and another worker prefills to go on."""
    STREAMING = auto()


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long a request may take to the end of its prefill leg, to its first token and to its end, and how
    long its stream may be silent before the worker counts as lost; in seconds.
    """

    prefill_s: float
    first_token_s: float
    between_tokens_s: float
    request_s: float


class StallWatch:
    """Calls ``on_too_long`` once each time a limit is reached. All moments are on the monotonic clock.

    Time that the client takes to read counts for no worker: it begins with :meth:`pause` and ends with
    :meth:`resume`. Neither does time in which this process stood still: what came meanwhile waits to be read.
    """

    __slots__ = (
        "_began_s",
        "_check_s",
        "_loop",
        "_on_too_long",
        "_paused_s",
        "_timeouts",
        "_timer",
        "phase",
        "progress_s",
    )

    def __init__(self, timeouts: Timeouts, on_too_long: Callable[[TooLong, float], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._timeouts = timeouts
        self._on_too_long = on_too_long
        self._timer: asyncio.TimerHandle | None = None
        self._began_s = self._check_s = self.progress_s = time.monotonic()
        self._paused_s: float | None = None
        """Since when the client has what came; None while a worker is waited for."""
        self.phase = Phase.FIRST_TOKEN

    @property
    def time_left_s(self) -> float:
        """How long the request may still take, in seconds."""
        return max(0.0, self._began_s + self._timeouts.request_s - time.monotonic())

    def enter(self, phase: Phase) -> None:
        """From now on this is waited for."""
        self.phase = phase
        self.progress_s = time.monotonic()
        self._paused_s = self.progress_s if phase is Phase.STREAMING else None
        self._arm()

    def pause(self) -> None:
        """The client has what came."""
        self._paused_s = time.monotonic()

    def resume(self, *, progressed: bool) -> None:
        """A worker is waited for. ``heard``: what came last was a sign that it is at work."""
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
        """Watch no longer, and drop the callback: what a request held goes with its last user."""
        self._disarm()
        self._on_too_long = _no_callback

    def _due(self) -> tuple[float, TooLong]:
        """When the next limit is reached, and which one it is."""
        timeouts = self._timeouts
        end_s = self._began_s + timeouts.request_s
        if self.phase is Phase.PREFILLING:
            limit_s, kind = self._began_s + timeouts.prefill_s, TooLong.PREFILL
        elif self.phase is Phase.FIRST_TOKEN:
            limit_s, kind = self._began_s + timeouts.first_token_s, TooLong.FIRST_TOKEN
        elif self.phase is Phase.RESUMING:
            limit_s, kind = self.progress_s + timeouts.first_token_s, TooLong.SILENCE
        else:
            limit_s, kind = self.progress_s + timeouts.between_tokens_s, TooLong.SILENCE
        return (end_s, TooLong.REQUEST) if end_s <= limit_s else (limit_s, kind)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        self._disarm()
        now_s = time.monotonic()
        wait_s = max(0.0, self._due()[0] - now_s)
        self._check_s = now_s + wait_s
        self._timer = self._loop.call_later(wait_s, self._check)

    def _check(self) -> None:
        self._timer = None
        now_s = time.monotonic()
        self._leave_out_client(now_s)
        due_s, kind = self._due()
        late_s = now_s - self._check_s
        if kind is TooLong.SILENCE and late_s > LATE_S:
            # as long as this process stood still, and as long again to read what came meanwhile
            self.progress_s = min(now_s, self.progress_s + 2.0 * late_s)
            due_s, kind = self._due()
        if now_s < due_s:
            self._arm()
        else:
            self._on_too_long(kind, now_s - self.progress_s)


def _no_callback(_kind: TooLong, _silent_s: float) -> None:
    """Whose watch it was has ended."""

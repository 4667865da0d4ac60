"""Who has been silent for too long: one timer a request, armed anew only when it fires."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

LATE_S = 0.1
"""A look that comes so much too late says that this process stood still, and not that a worker is silent."""


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
class Patience:
    """How long a request may take to the end of its prefill leg, to its first token and to its end, and how
    long its stream may be silent before the worker counts as lost; in seconds.
    """

    prefill_s: float
    first_token_s: float
    between_tokens_s: float
    request_s: float


class SilenceWatch:
    """Tells ``on_too_long`` once each time a limit is reached. All moments are on the monotonic clock.

    Time that the client takes to read counts for no worker: only an open read is a worker's silence. Neither
    does time in which this process stood still: what came meanwhile waits to be read.
    """

    __slots__ = (
        "_began_s",
        "_look_s",
        "_loop",
        "_on_too_long",
        "_patience",
        "_timer",
        "heard_s",
        "is_reading",
        "phase",
    )

    def __init__(self, patience: Patience, on_too_long: Callable[[TooLong, float], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._patience = patience
        self._on_too_long = on_too_long
        self._timer: asyncio.TimerHandle | None = None
        self._began_s = self._look_s = self.heard_s = time.monotonic()
        self.is_reading = False
        self.phase = Phase.FIRST_TOKEN

    @property
    def time_left_s(self) -> float:
        """How long the request may still take, in seconds."""
        return max(0.0, self._began_s + self._patience.request_s - time.monotonic())

    def enter(self, phase: Phase) -> None:
        """From now on this is waited for."""
        self.phase = phase
        self.heard_s = time.monotonic()
        self._arm()

    def stop(self) -> None:
        """Watch no longer, and know nobody who would be told: what a request held goes with its last user."""
        self._disarm()
        self._on_too_long = _tell_nobody

    def _due(self) -> tuple[float, TooLong]:
        """When the next limit is reached, and which one it is."""
        patience = self._patience
        end_s = self._began_s + patience.request_s
        if self.phase is Phase.PREFILLING:
            limit_s, kind = self._began_s + patience.prefill_s, TooLong.PREFILL
        elif self.phase is Phase.FIRST_TOKEN:
            limit_s, kind = self._began_s + patience.first_token_s, TooLong.FIRST_TOKEN
        elif self.phase is Phase.RESUMING:
            limit_s, kind = self.heard_s + patience.first_token_s, TooLong.SILENCE
        else:
            limit_s, kind = self.heard_s + patience.between_tokens_s, TooLong.SILENCE
        return (end_s, TooLong.REQUEST) if end_s <= limit_s else (limit_s, kind)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        self._disarm()
        now_s = time.monotonic()
        wait_s = max(0.0, self._due()[0] - now_s)
        self._look_s = now_s + wait_s
        self._timer = self._loop.call_later(wait_s, self._look)

    def _look(self) -> None:
        self._timer = None
        now_s = time.monotonic()
        if self.phase is Phase.STREAMING and not self.is_reading:
            self.heard_s = now_s  # it is the client who is slow
        due_s, kind = self._due()
        late_s = now_s - self._look_s
        if kind is TooLong.SILENCE and late_s > LATE_S:
            # as long as this process stood still, and as long again to read what came meanwhile
            self.heard_s = min(now_s, self.heard_s + 2.0 * late_s)
            due_s, kind = self._due()
        if now_s < due_s:
            self._arm()
        else:
            self._on_too_long(kind, now_s - self.heard_s)


def _tell_nobody(_kind: TooLong, _silent_s: float) -> None:
    """Whose watch it was has ended."""

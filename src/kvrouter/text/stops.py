"""Stop strings in a stream of text.

The rule does not depend on how the text is cut: the stop string that is complete first ends the stream; of
several that end at the same character, the longest. The stop string and all after it are not given out.
"""

import re
from collections.abc import Sequence

from kvrouter.core.errors import InvalidRequest

STOPS_MAX = 4
STOP_CHARS_MAX = 256


def stops_fit(stops: Sequence[str]) -> bool:
    """Whether a :class:`StopMatcher` takes these."""
    return len(stops) <= STOPS_MAX and all(0 < len(stop) <= STOP_CHARS_MAX for stop in stops)


class StopMatcher:
    """Watches one stream. Text that may still turn out to be a stop string is held back."""

    __slots__ = ("_held", "_hold_chars", "_openers", "_prefixes", "_stops", "stopped")

    def __init__(self, stops: Sequence[str]) -> None:
        """Take up to ``STOPS_MAX`` strings of 1 to ``STOP_CHARS_MAX`` characters, else ``InvalidRequest``."""
        if len(stops) > STOPS_MAX:
            raise InvalidRequest(f"stop: at most {STOPS_MAX} strings, not {len(stops)}", param="stop")
        for stop in stops:
            if not 0 < len(stop) <= STOP_CHARS_MAX:
                raise InvalidRequest(
                    f"stop: a string has 1 to {STOP_CHARS_MAX} characters, not {len(stop)}", param="stop"
                )
        # The longest first: of equal ends, the earliest start wins.
        self._stops = sorted(set(stops), key=lambda stop: (-len(stop), stop))
        self._prefixes = frozenset(stop[:size] for stop in stops for size in range(1, len(stop)))
        self._openers = (
            re.compile("[" + re.escape("".join({stop[0] for stop in stops})) + "]") if stops else None
        )
        self._hold_chars = len(self._stops[0]) - 1 if stops else 0
        self._held = ""
        self.stopped: str | None = None
        """The stop string that ended the stream."""

    @property
    def is_idle(self) -> bool:
        """Whether there is no stop string, so that all text may be given out."""
        return self._openers is None

    def push(self, text: str) -> tuple[str, str | None]:
        """Return the text that may be given out and, once it has come, the stop string."""
        if self._openers is None:
            return text, None
        if self.stopped is not None:
            return "", self.stopped
        pending = self._held + text
        if self._openers.search(pending) is None:
            return pending, None
        start = self._find(pending)
        if start is not None:
            self._held = ""
            return pending[:start], self.stopped
        keep_from = self._hold_from(pending)
        self._held = pending[keep_from:]
        return pending[:keep_from], None

    def finish(self) -> str:
        """Return what was held back: the stream has ended without a stop string."""
        held, self._held = self._held, ""
        return held

    def _find(self, pending: str) -> int | None:
        """Note the stop string that is complete first and return where it starts."""
        best_end = len(pending) + 1
        best_start = None
        for stop in self._stops:
            start = pending.find(stop, 0, best_end - 1)
            if start >= 0:
                best_start, best_end, self.stopped = start, start + len(stop), stop
        return best_start

    def _hold_from(self, pending: str) -> int:
        """Return where the longest end of ``pending`` that begins a stop string starts."""
        if self._openers is not None:
            for opener in self._openers.finditer(pending, max(0, len(pending) - self._hold_chars)):
                if pending[opener.start() :] in self._prefixes:
                    return opener.start()
        return len(pending)

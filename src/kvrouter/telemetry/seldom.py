"""What is tried again and again is told seldom."""

import time
from collections.abc import Callable

AGAIN_AFTER_S = 60.0
"""How long the same line is not told again."""

LINES_MAX = 256
"""How many lines are remembered; beyond it the oldest may be told again."""


class Seldom:
    """Remembers what was told."""

    def __init__(
        self, *, again_after_s: float = AGAIN_AFTER_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._again_after_s = again_after_s
        self._clock = clock
        self._told_s: dict[str, float] = {}

    def allows(self, line: str) -> bool:
        """Whether to tell this line now: it was not told, or a while ago."""
        now_s = self._clock()
        told_s = self._told_s.pop(line, None)
        may = told_s is None or now_s - told_s >= self._again_after_s
        self._told_s[line] = now_s if may or told_s is None else told_s
        if len(self._told_s) > LINES_MAX:
            del self._told_s[next(iter(self._told_s))]
        return may

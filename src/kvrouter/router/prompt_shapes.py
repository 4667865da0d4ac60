"""Tells for which shapes of calls the engine makes another prompt than the router: their cache is not found.

A shape is a route, the roles in a call and whether it has tools, such as ``chat developer+user tools``. What
is wrong with one shape is wrong at every engine of its kind, and looks like an index that is late at each.
"""

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

SHAPES_MAX = 64
"""Shapes of one model that are counted apart; what comes later counts as :data:`OTHER_SHAPES`."""

OTHER_SHAPES = "other"

WINDOW_ANSWERS = 16
"""So many answers of a shape are judged together, once there are :data:`ANSWERS_MIN`."""

ANSWERS_MIN = 6
BLIND_SHARE = 0.75
SEEING_SHARE = 0.5
"""From which share of missed answers on a shape is blind, and below which it no longer is."""

SPAN_S = 5.0
"""The answers that are judged lie at least so far apart: a burst of one new prompt is predicted by nobody."""

TOLERANCE_BLOCKS = 1
"""An engine may count one block otherwise: it computes the last token of a prompt in any case."""


def by_engine(shape: str) -> str:
    """Return the shape of calls whose prompt an engine tokenized: they are judged apart."""
    return f"{shape} by /tokenize" if shape else ""


class ShapeReading(NamedTuple):
    """The last answers of a shape that had something to find, and of how many the router did not find it."""

    shape: str
    answers: int
    missed: int
    is_blind: bool


class NotedShape(NamedTuple):
    """One answer of a shape; ``turned_blind`` when it made the shape blind."""

    shape: str
    is_missed: bool
    is_blind: bool
    turned_blind: ShapeReading | None


class _Window:
    """The last answers: when each came, and whether it was missed."""

    __slots__ = ("answers", "is_blind")

    def __init__(self) -> None:
        self.answers: deque[tuple[float, bool]] = deque(maxlen=WINDOW_ANSWERS)
        self.is_blind = False

    def take(self, now_s: float, *, is_missed: bool) -> bool:
        """Note an answer; return whether the shape became blind with it."""
        self.answers.append((now_s, is_missed))
        share = self.missed / len(self.answers)
        was_blind = self.is_blind
        if was_blind:
            self.is_blind = share >= SEEING_SHARE
        elif len(self.answers) >= ANSWERS_MIN and now_s - self.answers[0][0] >= SPAN_S:
            self.is_blind = share >= BLIND_SHARE
        return self.is_blind and not was_blind

    @property
    def missed(self) -> int:
        return sum(is_missed for _, is_missed in self.answers)


class PromptShapes:
    """The shapes of one model's calls."""

    def __init__(self, *, block_size: int) -> None:
        self._block_size = block_size
        self._windows: dict[str, _Window] = {}

    def note(
        self,
        shape: str,
        *,
        predicted_tokens: int,
        cached_tokens: int,
        isl_tokens: int,
        prompt_tokens: int | None,
        now_s: float,
    ) -> NotedShape | None:
        """An engine answered a call of this shape. None where it says nothing of the prompt: nothing was
        cached, or more was predicted than there is.
        """
        missing_blocks = (cached_tokens - predicted_tokens) // self._block_size
        is_other = prompt_tokens is not None and prompt_tokens != isl_tokens
        if not is_other and (not cached_tokens or missing_blocks < -TOLERANCE_BLOCKS):
            return None
        shape = self._counted_as(shape)
        window = self._windows.setdefault(shape, _Window())
        is_missed = is_other or missing_blocks > TOLERANCE_BLOCKS
        turned = window.take(now_s, is_missed=is_missed)
        reading = ShapeReading(shape, len(window.answers), window.missed, window.is_blind)
        return NotedShape(shape, is_missed, window.is_blind, reading if turned else None)

    def is_blind(self, shape: str) -> bool:
        """Whether calls of this shape are not found where their engine has them cached."""
        window = self._windows.get(self._counted_as(shape))
        return window is not None and window.is_blind

    def _counted_as(self, shape: str) -> str:
        return shape if shape in self._windows or len(self._windows) < SHAPES_MAX else OTHER_SHAPES

    def readings(self) -> Iterator[ShapeReading]:
        """Yield what is known of each shape, by name."""
        for shape, window in sorted(self._windows.items()):
            yield ShapeReading(shape, len(window.answers), window.missed, window.is_blind)

"""Prompt shapes: finds the shapes of calls for which the engine makes another prompt than the router, so that
their cached blocks are not found.

A shape is a route, the roles in a call and its further features, such as ``chat developer+user tools``. A
wrong shape is wrong at every engine of its kind, and looks like a late index at each of them.
"""

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

SHAPES_MAX = 64
"""The most shapes of one model that are counted separately; later ones count as :data:`OTHER_SHAPES`."""

OTHER_SHAPES = "other"

WINDOW_ANSWERS = 16
"""How many answers of a shape are judged together, once there are :data:`ANSWERS_MIN`."""

ANSWERS_MIN = 6
BLIND_SHARE = 0.75
SEEING_SHARE = 0.5
"""A shape becomes blind from this share of missed answers, and sees again below the second."""

SPAN_S = 5.0
"""The judged answers span at least this time: no index predicts the first burst of a new prompt."""

TOLERANCE_BLOCKS = 1
"""A difference that is no error: engines always compute a prompt's last token again."""


def by_engine(shape: str) -> str:
    """Return the shape for calls whose prompt an engine tokenized; they are judged separately."""
    return f"{shape} by /tokenize" if shape else ""


class ShapeReading(NamedTuple):
    """A shape's last answers with cached blocks, and how many of them the router missed."""

    shape: str
    answers: int
    missed: int
    is_blind: bool


class NotedShape(NamedTuple):
    """One answer of a shape; ``turned_blind`` is set when it made the shape blind."""

    shape: str
    is_missed: bool
    is_blind: bool
    turned_blind: ShapeReading | None


class _Window:
    """A shape's last answers: arrival time, and whether the router missed the cached blocks."""

    __slots__ = ("answers", "is_blind")

    def __init__(self) -> None:
        self.answers: deque[tuple[float, bool]] = deque(maxlen=WINDOW_ANSWERS)
        self.is_blind = False

    def take(self, now_s: float, *, is_missed: bool) -> bool:
        """Note an answer; return whether it made the shape blind."""
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
    """Judges the shapes of one model's calls by the answers of its engines."""

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
        """Note an answer to a call of this shape. Returns None where it shows nothing about the prompt: no
        block was cached, or the prediction was too high.
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
        """Whether the router misses the cached blocks of calls of this shape."""
        window = self._windows.get(self._counted_as(shape))
        return window is not None and window.is_blind

    def _counted_as(self, shape: str) -> str:
        return shape if shape in self._windows or len(self._windows) < SHAPES_MAX else OTHER_SHAPES

    def readings(self) -> Iterator[ShapeReading]:
        """Yield the reading of each shape, by name."""
        for shape, window in sorted(self._windows.items()):
            yield ShapeReading(shape, len(window.answers), window.missed, window.is_blind)

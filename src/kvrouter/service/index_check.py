"""Does the index know what engines have cached? Their own answers tell, request by request."""

from collections import deque
from enum import StrEnum
from typing import NamedTuple

from kvrouter.core.ids import Slot

WINDOW_ANSWERS = 16
"""So many answers in a row are judged together."""

WRONG_SHARE = 0.5
"""From this share of wrong predictions on the index is wrong, and not only late."""

SPAN_S = 5.0
"""The answers that are judged lie at least so far apart: a burst of one new prompt is predicted by nobody."""

TOLERANCE_BLOCKS = 1
"""An engine may count one block otherwise: it computes the last token of a prompt in any case."""


class Prediction(StrEnum):
    """What one answer showed: the index promised the blocks that the engine has, or too many, or too few; or
    nothing of the index, since the engine made another prompt of the call than was routed.
    """

    RIGHT = "right"
    TOO_MANY = "too_many"
    TOO_FEW = "too_few"
    OTHER_PROMPT = "other_prompt"


class Answers(NamedTuple):
    """What the last answers of a rank came to: how many of them were predicted wrongly, and by how much all
    were on average; above 0 the index promises blocks that the engine does not have.
    """

    n_answers: int
    n_wrong: int
    mean_error_blocks: float


class Compared(NamedTuple):
    """One answer beside its prediction; ``wrong`` when the index is, by the last answers together."""

    prediction: Prediction
    wrong: Answers | None


class _Window:
    """The last answers: when each came, and by how many blocks its prediction was too high."""

    __slots__ = ("answers", "n_since_verdict")

    def __init__(self) -> None:
        self.answers: deque[tuple[float, int]] = deque(maxlen=WINDOW_ANSWERS)
        self.n_since_verdict = 0

    def summed(self) -> Answers:
        errors = [error for _, error in self.answers]
        n_wrong = sum(1 for error in errors if abs(error) > TOLERANCE_BLOCKS)
        return Answers(len(errors), n_wrong, sum(errors) / len(errors))


class IndexCheck:
    """Keeps the last answers of every slot's rank. Only answers with something to predict count."""

    def __init__(self, *, block_size: int) -> None:
        self._block_size = block_size
        self._windows: dict[Slot, _Window] = {}

    def note(
        self,
        slot: Slot,
        *,
        predicted_tokens: int,
        cached_tokens: int,
        isl_tokens: int,
        prompt_tokens: int | None,
        now_s: float,
    ) -> Compared | None:
        """An engine answered, and counts ``prompt_tokens`` where it tells; ``isl_tokens`` were routed. None
        where there was nothing to predict. What is wrong is told once a whole window is, and then again after
        another one.
        """
        if prompt_tokens is not None and prompt_tokens != isl_tokens:
            return Compared(Prediction.OTHER_PROMPT, None)
        most = (isl_tokens - 1) // self._block_size * self._block_size  # the last token is always computed
        predicted_tokens = min(predicted_tokens, most)
        if not predicted_tokens and not cached_tokens:
            return None
        window = self._windows.get(slot)
        if window is None:
            window = self._windows[slot] = _Window()
        error = (predicted_tokens - cached_tokens) // self._block_size
        window.answers.append((now_s, error))
        window.n_since_verdict += 1
        return Compared(_prediction(error), self._judged(window))

    def last_answers(self, slot: Slot) -> Answers | None:
        """What the last answers of the slot's rank came to; None before the first."""
        window = self._windows.get(slot)
        return None if window is None else window.summed()

    def freed(self, slot: Slot) -> None:
        """The slot's rank is gone."""
        self._windows.pop(slot, None)

    @staticmethod
    def _judged(window: _Window) -> Answers | None:
        answers = window.answers
        if window.n_since_verdict < WINDOW_ANSWERS or answers[-1][0] - answers[0][0] < SPAN_S:
            return None
        summed = window.summed()
        if summed.n_wrong < WRONG_SHARE * WINDOW_ANSWERS:
            return None
        window.n_since_verdict = 0
        return summed


def _prediction(error_blocks: int) -> Prediction:
    if abs(error_blocks) <= TOLERANCE_BLOCKS:
        return Prediction.RIGHT
    return Prediction.TOO_MANY if error_blocks > 0 else Prediction.TOO_FEW

"""Compares what engines found in their caches with what the index predicted."""

from collections import deque
from enum import StrEnum
from typing import NamedTuple

from kvrouter.core.ids import Slot

WINDOW_ANSWERS = 16
"""How many consecutive answers are judged together."""


WRONG_SHARE = 0.5
"""Share of wrong predictions from which the index counts as wrong, and not only as late."""


SPAN_S = 5.0
"""The judged answers span at least this time: no index predicts the first burst of a new prompt."""


TOLERANCE_BLOCKS = 1
"""A difference that is no error: engines always compute a prompt's last token again."""


class Prediction(StrEnum):
    """How an answer compares with its prediction: right, too many or too few blocks predicted; OTHER_PROMPT
    where the engine made other tokens of the call than the router, which says nothing about the index.
    """

    RIGHT = "right"
    TOO_MANY = "too_many"
    TOO_FEW = "too_few"
    OTHER_PROMPT = "other_prompt"


class AnswerCounts(NamedTuple):
    """The last answers of one rank: how many there are, how many were predicted wrongly, and the mean error
    of all in blocks; above 0 the index predicts blocks that the engine does not have. ``span_s`` is the time
    from the first of them to the last.
    """

    n_answers: int
    n_wrong: int
    mean_error_blocks: float
    span_s: float


class Compared(NamedTuple):
    """One answer compared with its prediction; ``wrong`` is set when the last answers condemn the index."""

    prediction: Prediction
    wrong: AnswerCounts | None


class _Window:
    """The last answers of one rank: arrival time, and by how many blocks the prediction was too high."""

    __slots__ = ("answers", "n_since_verdict", "was_asked_in_vain")

    def __init__(self) -> None:
        self.answers: deque[tuple[float, int]] = deque(maxlen=WINDOW_ANSWERS)
        self.n_since_verdict = 0
        self.was_asked_in_vain = False
        """Whether a snapshot was requested for a blind shape; a second one would not help."""

    def summed(self) -> AnswerCounts:
        errors = [error for _, error in self.answers]
        n_wrong = sum(1 for error in errors if abs(error) > TOLERANCE_BLOCKS)
        span_s = self.answers[-1][0] - self.answers[0][0]
        return AnswerCounts(len(errors), n_wrong, sum(errors) / len(errors), span_s)


class IndexCheck:
    """Keeps each slot's last answers. An answer counts only where blocks were predicted or cached."""

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
        is_blind: bool = False,
    ) -> Compared | None:
        """Note an answer: ``isl_tokens`` were routed, and the engine counts ``prompt_tokens``, or None.
        Returns None where no block was predicted or cached. A wrong index is reported once per window of
        wrong answers; for calls whose shape ``is_blind`` only once until an answer is right, because the
        engine makes another prompt of them and a new snapshot does not help.
        """
        if prompt_tokens is not None and prompt_tokens != isl_tokens:
            return Compared(Prediction.OTHER_PROMPT, None)
        if not predicted_tokens and not cached_tokens:
            return None
        window = self._windows.get(slot)
        if window is None:
            window = self._windows[slot] = _Window()
        error = (predicted_tokens - cached_tokens) // self._block_size
        prediction = _prediction(error)
        if is_blind and window.was_asked_in_vain:
            return Compared(prediction, None)
        if prediction is Prediction.RIGHT:
            window.was_asked_in_vain = False
        window.answers.append((now_s, error))
        window.n_since_verdict += 1
        wrong = self._judged(window)
        window.was_asked_in_vain |= is_blind and wrong is not None
        return Compared(prediction, wrong)

    def last_answers(self, slot: Slot) -> AnswerCounts | None:
        """The counts of the slot's last answers; None before the first."""
        window = self._windows.get(slot)
        return None if window is None else window.summed()

    def freed(self, slot: Slot) -> None:
        """Forget the slot's rank, which has left."""
        self._windows.pop(slot, None)

    @staticmethod
    def _judged(window: _Window) -> AnswerCounts | None:
        if window.n_since_verdict < WINDOW_ANSWERS:
            return None
        summed = window.summed()
        if summed.span_s < SPAN_S or summed.n_wrong < WRONG_SHARE * WINDOW_ANSWERS:
            return None
        window.n_since_verdict = 0
        return summed


def _prediction(error_blocks: int) -> Prediction:
    if abs(error_blocks) <= TOLERANCE_BLOCKS:
        return Prediction.RIGHT
    return Prediction.TOO_MANY if error_blocks > 0 else Prediction.TOO_FEW

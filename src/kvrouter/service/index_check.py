"""Does the index know what engines have cached? Their own answers tell, request by request."""

from collections import deque
from typing import NamedTuple

from kvrouter.core.ids import WorkerRank

WINDOW_ANSWERS = 16
"""So many answers in a row are judged together."""

WRONG_SHARE = 0.5
"""From this share of wrong predictions on the index is wrong, and not only late."""

SPAN_S = 5.0
"""The answers that are judged lie at least so far apart: a burst of one new prompt is predicted by nobody."""

TOLERANCE_BLOCKS = 1
"""An engine may count one block otherwise: it computes the last token of a prompt in any case."""

RANKS_MAX = 65_536


class Wrong(NamedTuple):
    """What a window of answers came to: how many of them were predicted wrongly, and by how much on average;
    above 0 the index promises blocks that the engine does not have.
    """

    n_wrong: int
    n_answers: int
    mean_error_blocks: float


class _Window:
    __slots__ = ("answers",)

    def __init__(self) -> None:
        self.answers: deque[tuple[float, int]] = deque(maxlen=WINDOW_ANSWERS)


class IndexCheck:
    """Keeps the last answers of every worker rank. Only answers with something to predict count."""

    def __init__(self, *, block_size: int) -> None:
        self._block_size = block_size
        self._windows: dict[WorkerRank, _Window] = {}

    def note(
        self, rank: WorkerRank, *, predicted_tokens: int, cached_tokens: int, isl_tokens: int, now_s: float
    ) -> Wrong | None:
        """An engine answered; return what is wrong once a whole window is, and begin another one."""
        most = (isl_tokens - 1) // self._block_size * self._block_size  # the last token is always computed
        predicted_tokens = min(predicted_tokens, most)
        if not predicted_tokens and not cached_tokens:
            return None
        window = self._windows.get(rank)
        if window is None:
            if len(self._windows) >= RANKS_MAX:
                self._windows.clear()
            window = self._windows[rank] = _Window()
        window.answers.append((now_s, (predicted_tokens - cached_tokens) // self._block_size))
        return self._judged(window)

    def forget(self, rank: WorkerRank) -> None:
        """The worker is gone, or what it holds was asked for anew."""
        self._windows.pop(rank, None)

    @staticmethod
    def _judged(window: _Window) -> Wrong | None:
        answers = window.answers
        if len(answers) < WINDOW_ANSWERS or answers[-1][0] - answers[0][0] < SPAN_S:
            return None
        errors = [error for _, error in answers if abs(error) > TOLERANCE_BLOCKS]
        if len(errors) < WRONG_SHARE * WINDOW_ANSWERS:
            return None
        answers.clear()
        return Wrong(len(errors), WINDOW_ANSWERS, sum(errors) / len(errors))

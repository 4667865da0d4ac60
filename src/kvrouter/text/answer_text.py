"""The text of one answer, from its tokens as they come, up to a stop string."""

from collections.abc import Sequence

from kvrouter.text.detokenizer import Detokenizer
from kvrouter.text.stops import StopMatcher


class AnswerText:
    """An answer's text: what is certain, piece by piece, and nothing after a stop string."""

    __slots__ = ("_detokenizer", "_matcher", "stopped")

    def __init__(self, detokenizer: Detokenizer, matcher: StopMatcher) -> None:
        self._detokenizer = detokenizer
        self._matcher = matcher
        self.stopped = False
        """Whether a stop string ended the answer: nothing after it is given out."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that is certain with these tokens; a stop string in it sets ``stopped``."""
        text, stopped = self._matcher.push(self._detokenizer.push(token_ids))
        self.stopped = self.stopped or stopped is not None
        return text

    def finish(self) -> str:
        """Return what was held back: no more tokens come."""
        text, stopped = self._matcher.push(self._detokenizer.finish())
        if stopped is None:
            return text + self._matcher.finish()
        self.stopped = True
        return text

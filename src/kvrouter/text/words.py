"""Words of which each is one token of the mock model, for prompts of an exact length."""

from functools import cache
from pathlib import Path

MOCK_FOLDER = Path(__file__).parent / "data" / "mock"
FIRST_WORD_ID = 256


@cache
def mock_words() -> tuple[str, ...]:
    """Return the words, all different.

    Any text ``"".join(" " + word for …)`` of n of them encodes into exactly n tokens, wherever it stands:
    at the start, after a newline, a special token or punctuation. The i-th word, with its space, is the token
    ``FIRST_WORD_ID + i``.
    """
    return tuple((MOCK_FOLDER / "words.txt").read_text(encoding="utf-8").split())

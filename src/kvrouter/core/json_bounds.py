"""A scan of JSON or msgpack by the native core, which bounds counts and depth before any object is built.

A text of a few megabytes can encode a million objects, which take seconds to build and a hundred times the
memory. The scan builds no object and releases the interpreter lock, so other threads continue.
"""

from kvrouter._native import JsonBounds, MsgpackBounds, token_ids

__all__ = ["BLANKS_IN_ROW_MAX", "BLANKS_MAX", "JsonBounds", "JsonRefused", "MsgpackBounds", "token_ids"]

BLANKS_IN_ROW_MAX = 64 * 1024
BLANKS_MAX = 4 * 1024 * 1024
"""The most blanks outside of strings. Decoders skip them under the interpreter lock, at 2 ms a megabyte."""


class JsonRefused(ValueError):
    """The text is not valid JSON, or a text or msgpack frame exceeds its bounds.

    ``kind`` is ``syntax`` (with details in ``what``), ``not_finite`` (NaN or an infinity), ``token_id`` (a
    list of token ids has an invalid element), or the name of a bound. ``path`` is the field, such as
    ``messages[2].content``, empty for the root; ``at`` is the byte offset.
    """

    def __init__(self, kind: str, path: str, at: int, what: str) -> None:
        super().__init__(f"{kind} at byte {at}, {path!r} {what}")
        self.kind = kind
        self.path = path
        self.at = at
        self.what = what

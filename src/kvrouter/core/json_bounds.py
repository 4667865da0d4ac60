"""A scan of JSON, or of msgpack, by the native core: counts and depth are bounded before any object is built.

Text of a few megabytes can stand for a million objects, which take seconds to build and a hundred times the
memory. The scan holds no object and gives the interpreter up, so other work goes on meanwhile.
"""

from kvrouter._native import JsonBounds, MsgpackBounds, token_ids

__all__ = ["BLANKS_IN_ROW_MAX", "BLANKS_MAX", "JsonBounds", "JsonRefused", "MsgpackBounds", "token_ids"]

BLANKS_IN_ROW_MAX = 64 * 1024
BLANKS_MAX = 4 * 1024 * 1024
"""Outside of strings. Decoders skip them under the interpreter's lock, 2 ms a megabyte each time."""


class JsonRefused(ValueError):
    """Text that is no JSON, or text or a frame of msgpack that would become more than its bounds allow.

    ``kind`` is ``syntax`` (``what`` says more), ``not_finite`` (NaN or an infinity), ``token_id`` (an element
    of a list of token ids is none), or the name of a bound.
    ``path`` is that of the field, such as ``messages[2].content``, empty for the whole; ``at`` a byte.
    """

    def __init__(self, kind: str, path: str, at: int, what: str) -> None:
        super().__init__(f"{kind} at byte {at}, {path!r} {what}")
        self.kind = kind
        self.path = path
        self.at = at
        self.what = what

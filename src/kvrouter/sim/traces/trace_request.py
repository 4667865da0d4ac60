"""One request of a trace in any format."""

from array import array
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import force_setattr

if TYPE_CHECKING:
    Pieces = array[int]
else:  # the array type takes no parameter at run time before Python 3.12
    Pieces = array
"""Names of consecutive pieces of a prompt, as ``array('Q')``: unsigned 64 bits each."""


class Wait(msgspec.Struct, frozen=True):
    """Another request that one waits for, by its number: for its answer or, with ``for_arrival``, for its
    arrival; and ``think_s``, the seconds between that and the request.
    """

    number: int
    think_s: float = 0.0
    for_arrival: bool = False


class TraceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request. Two prompts are alike as far as their pieces are.

    ``number`` counts from 0 in the order of arrivals; ``at_s`` is the arrival by time stamp, in seconds from
    the trace's first. Each of ``pieces`` is ``piece_tokens`` tokens, the last one the rest; a tail may have
    no name. In a closed loop it comes after all of ``waits``, which have lower numbers, and no earlier than
    ``not_before_s`` seconds after the trace's first. It is in ``line`` of the file at ``path``, which is None
    if it was generated.
    """

    number: int
    at_s: float
    input_tokens: int
    output_tokens: int
    piece_tokens: int
    pieces: Pieces
    session: str = ""
    waits: tuple[Wait, ...] = ()
    not_before_s: float = 0.0
    path: Path | None = None
    line: int = 0
    has_answer: bool = True
    """Whether the trace has an answer of a token or more; any other one is read as one of 1 token."""
    named_tokens: int = 0
    """The tokens that ``pieces`` name, where those of the trace may go on with answers'; else 0."""

    def __post_init__(self) -> None:
        if not self.output_tokens:
            force_setattr(self, "output_tokens", 1)
            force_setattr(self, "has_answer", False)

    @property
    def place(self) -> str:
        """Its place and number: ``trace.jsonl:12: request 11``."""
        standing = "" if self.path is None else f"{self.path}:{self.line}: "
        return f"{standing}request {self.number}"


class TraceInfo(msgspec.Struct, frozen=True):
    """The values of a trace: its format, the tokens of its pieces, whether requests wait for others, and
    whether all have times of arrival. ``notes`` are what it does not say, and what stands for that.
    """

    format: str
    piece_tokens: int
    has_sessions: bool
    has_times: bool = True
    notes: tuple[str, ...] = ()

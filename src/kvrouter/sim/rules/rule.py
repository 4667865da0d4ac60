"""A published routing rule, and what it may read of a decision."""

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvrouter.core.ids import Slot
from kvrouter.core.requests import Leg
from kvrouter.core.timing import Timing
from kvrouter.fleet import FloatColumn, SlotColumn
from kvrouter.routing.request import RouteRequest, View


class RankLoads(Protocol):
    """Load by slot. ``in_flight``: requests placed there that have not ended; ``waiting`` and ``kv_use`` are
    of the rank's last load report: requests that wait, and the share of KV blocks in use. ``timing`` says
    which of ``timings`` is the engine's.
    """

    in_flight: npt.NDArray[np.int64]
    waiting: npt.NDArray[np.int64]
    kv_use: npt.NDArray[np.float64]
    timing: npt.NDArray[np.int64]

    @property
    def timings(self) -> Sequence[Timing]:
        """The timings of all engines that were here."""


class RuleInput(NamedTuple):
    """One decision about one leg. ``allowed`` are the slots that may take it, in the order of ranks: at least
    one. ``draw`` is 64 random bits, ``session`` is "" where nobody knows it.
    """

    request: RouteRequest
    session: str
    leg: Leg
    view: View
    allowed: SlotColumn
    loads: RankLoads
    draw: int


class Rule(Protocol):
    """Picks one of the slots that a decision allows. ``source``: where it is published."""

    source: ClassVar[str]

    def pick(self, given: RuleInput) -> Slot:
        """Return one of ``given.allowed``."""


def cached_tokens(given: RuleInput) -> FloatColumn:
    """Tokens of the prompt that each allowed slot holds, as the router's index has it."""
    overlap = given.view.overlap_blocks
    if overlap is None:
        return np.zeros(len(given.allowed))
    tokens: FloatColumn = np.multiply(
        overlap[given.allowed], float(given.view.fleet.block_size), dtype=np.float64
    )
    return tokens


def new_tokens(given: RuleInput) -> FloatColumn:
    """Tokens of the prompt that each allowed slot would have to compute."""
    return np.maximum(float(given.request.isl_tokens) - cached_tokens(given), 0.0, dtype=np.float64)


def lowest(scores: npt.NDArray[Any], given: RuleInput) -> Slot:
    """Return the allowed slot with the least score; one of equals is drawn."""
    best = np.flatnonzero(scores == scores.min())
    return Slot(int(given.allowed[best[given.draw % len(best)]]))

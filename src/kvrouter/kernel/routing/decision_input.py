"""The kept input of one decision, from which its candidates are computed when they are asked for.

Routing is pure: the same request and view give the same decision. So a kept decision has no row for each
worker rank. It has copies of the columns that change and the fleet as it was, and is decided again, with an
explanation, for whoever asks.
"""

from collections.abc import Iterator
from typing import Any, TypeVar, cast

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import structs

from kvrouter.core.errors import RoutingRefused
from kvrouter.core.ids import WorkerRank
from kvrouter.kernel.fleet.columns import BoolColumn
from kvrouter.kernel.fleet.fleet import Fleet
from kvrouter.kernel.routing.interface import Candidate, CostInput, RouteRequest, Speeds, View
from kvrouter.kernel.routing.masks import not_busy
from kvrouter.kernel.routing.route import route, route_decode
from kvrouter.kernel.topology.link_table import LinkState
from kvrouter.kernel.topology.policy import TransferConstraint

INPUT_BYTES = 4096
"""The approximate size of an input without its columns."""

BYTES_PER_SLOT = 74
"""The size of one slot in all columns of an input."""

Column = TypeVar("Column", bound=npt.NDArray[Any] | None)

LINK_BYTES = 400
"""The approximate size of the load or pace of one link."""

FLEET_BYTES_PER_SLOT = 512
"""The approximate size of one slot of a fleet's snapshot, which the inputs of its decisions share."""


class DecisionInput(msgspec.Struct, frozen=True, gc=False):
    """A request, and all that its decision depended on.

    ``view`` is the reading of the decision, whose columns later readings reuse; ``columns`` are the bytes
    that they had: of the overlap, the load, and the cost input. ``fleet`` is the fleet as it was, which the
    decisions between two of its changes share. ``constraint`` and ``prefill`` are those of a decode rank that
    was picked again; ``prefill`` is None for a first decision.
    """

    request: RouteRequest
    view: View
    fleet: Fleet
    columns: tuple[bytes | None, ...]
    transfers: LinkState | None
    not_busy: BoolColumn | None
    constraint: TransferConstraint | None
    prefill: WorkerRank | None
    n_bytes: int
    """The approximate size, without ``fleet``."""

    @property
    def fleet_bytes(self) -> int:
        """The approximate size of ``fleet``."""
        return INPUT_BYTES + FLEET_BYTES_PER_SLOT * self.fleet.n_slots

    def candidates(self) -> tuple[Candidate, ...]:
        """Decide again; return the row of each candidate, with its reason where it was refused."""
        view = self._view()
        try:
            if self.prefill is None:
                return route(self.request, view, explain=True).rows
            return route_decode(self.request, view, self.constraint, prefill=self.prefill, explain=True).rows
        except RoutingRefused as refused:
            return tuple(row for row in refused.rows if isinstance(row, Candidate))

    def _view(self) -> View:
        """Return the view as it was."""
        read, columns = self.view, iter(self.columns)
        return structs.replace(
            read,
            fleet=self.fleet,
            overlap_blocks=_column(read.overlap_blocks, columns),
            prefill_tokens=_column(read.prefill_tokens, columns),
            active_blocks=_column(read.active_blocks, columns),
            not_active=_column(read.not_active, columns),
            tokens_at_report=None,
            blocks_at_report=None,
            cost_input=None if read.cost_input is None else self._cost_input(read.cost_input, columns),
            not_busy=self.not_busy,
        )

    def _cost_input(self, read: CostInput, columns: Iterator[bytes | None]) -> CostInput:
        requests, waiting = _column(read.requests, columns), _column(read.waiting, columns)
        speeds = read.speeds
        if speeds is not None:
            speeds = Speeds(
                _column(speeds.slowness, columns),
                _column(speeds.decode_slowness, columns),
                _column(speeds.turnover, columns),
                _column(speeds.step_began_s, columns),
                speeds.now_s,
                speeds.answer_s,
                speeds.interference,
            )
        return CostInput(requests, waiting, speeds, self.transfers)


def _column(read: Column, columns: Iterator[bytes | None]) -> Column:
    """Return the next column as it was; ``read`` has its type, and is None where there is none."""
    content = next(columns)
    return read if read is None or content is None else cast("Column", np.frombuffer(content, read.dtype))


def decision_input(
    request: RouteRequest,
    view: View,
    *,
    constraint: TransferConstraint | None = None,
    prefill: WorkerRank | None = None,
) -> DecisionInput:
    """Return the input of a decision that was made of ``request`` and ``view``, before anything changes.

    It is called for each decision, so it copies columns and calculates nothing.
    """
    overlap, not_active, cost_input = view.overlap_blocks, view.not_active, view.cost_input
    columns: tuple[bytes | None, ...] = (
        None if overlap is None else overlap.tobytes(),
        view.prefill_tokens.tobytes(),
        view.active_blocks.tobytes(),
        None if not_active is None else not_active.tobytes(),
    )
    transfers = None
    if cost_input is not None:
        speeds, state = cost_input.speeds, cost_input.transfers
        columns += cost_input.requests.tobytes(), cost_input.waiting.tobytes()
        if speeds is not None:
            columns += (
                speeds.slowness.tobytes(),
                speeds.decode_slowness.tobytes(),
                speeds.turnover.tobytes(),
                speeds.step_began_s.tobytes(),
            )
        if state is not None:
            transfers = state.copy()
    n_bytes = INPUT_BYTES + BYTES_PER_SLOT * len(view.prefill_tokens)
    if transfers is not None:
        n_bytes += LINK_BYTES * transfers.n_entries
    fleet = view.fleet.snapshot
    return DecisionInput(
        request, view, fleet, columns, transfers, not_busy(view), constraint, prefill, n_bytes
    )

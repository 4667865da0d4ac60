"""Columns over slots: one numpy array per fact, kept when the fleet changes, never built per request."""

from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

BoolColumn = npt.NDArray[np.bool_]
FloatColumn = npt.NDArray[np.float64]
IntColumn = npt.NDArray[np.int64] | npt.NDArray[np.int32] | npt.NDArray[np.uint32] | npt.NDArray[np.uint64]
SlotColumn = npt.NDArray[np.intp]
"""Slots themselves, as indexes into columns."""

UNKNOWN: Final = -1
"""A count that the worker did not publish."""

INTEGER_MAX: Final = 2**63 - 1
"""The largest integer that a column holds."""

_MIN_CAPACITY: Final = 16
_Entry = TypeVar("_Entry", bound=np.generic)


class Columns:
    """What each slot's worker rank is, and its latest load report. Readers get arrays that they cannot write.

    Shapes: every column has ``n_slots`` entries. ``total_blocks`` is infinite where it is unknown, so that a
    fraction of it is 0; the other counts are ``UNKNOWN``. The arrays are replaced when ``n_slots`` changes:
    fetch them anew after each change of the fleet.
    """

    present: BoolColumn
    worker_id: npt.NDArray[np.int64]
    dp_rank: npt.NDArray[np.int64]
    alive: BoolColumn
    draining: BoolColumn
    engine_silent: BoolColumn
    circuit_open: BoolColumn
    prefill: BoolColumn
    decode_or_both: BoolColumn
    total_blocks: FloatColumn
    kv_bytes_per_token: npt.NDArray[np.int64]
    context_length: npt.NDArray[np.int64]
    has_report: BoolColumn
    report_active_blocks: npt.NDArray[np.int64]
    report_prefill_tokens: npt.NDArray[np.int64]
    report_running_requests: npt.NDArray[np.int64]
    report_waiting_requests: npt.NDArray[np.int64]
    rank_hash: npt.NDArray[np.uint64]

    def __init__(self) -> None:
        self._empty: dict[str, tuple[npt.DTypeLike, bool | int | float]] = {
            "present": (np.bool_, False),
            "worker_id": (np.int64, UNKNOWN),
            "dp_rank": (np.int64, UNKNOWN),
            "alive": (np.bool_, False),
            "draining": (np.bool_, False),
            "engine_silent": (np.bool_, False),
            "circuit_open": (np.bool_, False),
            "prefill": (np.bool_, False),
            "decode_or_both": (np.bool_, False),
            "total_blocks": (np.float64, np.inf),
            "kv_bytes_per_token": (np.int64, UNKNOWN),
            "context_length": (np.int64, UNKNOWN),
            "has_report": (np.bool_, False),
            "report_active_blocks": (np.int64, 0),
            "report_prefill_tokens": (np.int64, UNKNOWN),
            "report_running_requests": (np.int64, 0),
            "report_waiting_requests": (np.int64, 0),
            "rank_hash": (np.uint64, 0),
        }
        self._full = {
            name: np.full(_MIN_CAPACITY, empty, dtype) for name, (dtype, empty) in self._empty.items()
        }
        self._show(0)

    def resize(self, n_slots: int) -> None:
        """Have ``n_slots`` entries; what lies beyond is empty, and capacity follows in both directions."""
        capacity = fit_capacity(len(self._full["present"]), n_slots)
        for name, (_, empty) in self._empty.items():
            full = self._full[name]
            if len(full) != capacity:
                self._full[name] = resized(full, capacity, empty)
        self._show(n_slots)

    def write(self, slot: int, name: str, value: bool | int | float) -> None:
        """Set one entry."""
        self._full[name][slot] = value

    def clear(self, slot: int) -> None:
        """Make every entry of ``slot`` empty."""
        for name, (_, empty) in self._empty.items():
            self._full[name][slot] = empty

    def _show(self, n_slots: int) -> None:
        for name, full in self._full.items():
            shown = full[:n_slots]
            shown.flags.writeable = False
            setattr(self, name, shown)


def fit_capacity(capacity: int, n_slots: int) -> int:
    """Return the capacity for ``n_slots``: doubled when full, halved when three quarters are idle."""
    while capacity < n_slots:
        capacity *= 2
    while capacity > _MIN_CAPACITY and n_slots <= capacity // 4:
        capacity //= 2
    return capacity


def resized(full: npt.NDArray[_Entry], capacity: int, empty: bool | int | float) -> npt.NDArray[_Entry]:
    """Return a copy of ``full`` with ``capacity`` entries, the new ones ``empty``."""
    copy = np.full(capacity, empty, full.dtype)
    kept = min(capacity, len(full))
    copy[:kept] = full[:kept]
    return copy

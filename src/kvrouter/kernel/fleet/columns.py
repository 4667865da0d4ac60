"""Columns over slots: one numpy array per property, updated when the fleet changes."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from kvrouter.core.hashing import mix64
from kvrouter.core.ids import Slot, Taint, WorkerRank
from kvrouter.core.taints import named_domain
from kvrouter.kernel.topology.policy import Required, TransferPolicy

BoolColumn = npt.NDArray[np.bool_]
FloatColumn = npt.NDArray[np.float64]
IntColumn = npt.NDArray[np.int64] | npt.NDArray[np.int32] | npt.NDArray[np.uint32] | npt.NDArray[np.uint64]
SlotColumn = npt.NDArray[np.intp]
"""An array of slots, as indexes into columns."""

UNKNOWN: Final = -1
"""The entry of a count that the worker did not publish."""

INTEGER_MAX: Final = 2**63 - 1
"""The largest integer that a column holds."""

_MIN_CAPACITY: Final = 16
_Entry = TypeVar("_Entry", bound=np.generic)


class Columns:
    """The properties of each slot's worker rank, and its latest load report, as read-only arrays.

    Every column has ``n_slots`` entries. ``total_blocks`` and ``seats``, the number of requests that run at a
    time, are infinite when unknown, so that a fraction of them is 0; other unknown counts are ``UNKNOWN``.
    The arrays are replaced when ``n_slots`` changes: fetch them again after each change of the fleet.
    """

    present: BoolColumn
    worker_id: npt.NDArray[np.int64]
    dp_rank: npt.NDArray[np.int64]
    alive: BoolColumn
    draining: BoolColumn
    cordoned: BoolColumn
    engine_silent: BoolColumn
    circuit_open: BoolColumn
    prefill: BoolColumn
    decode_or_both: BoolColumn
    decode_only: BoolColumn
    total_blocks: FloatColumn
    seats: FloatColumn
    kv_bytes_per_token: npt.NDArray[np.int64]
    context_length: npt.NDArray[np.int64]
    prompt_tokens_min: npt.NDArray[np.int64]
    prompt_tokens_max: npt.NDArray[np.int64]
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
            "cordoned": (np.bool_, False),
            "engine_silent": (np.bool_, False),
            "circuit_open": (np.bool_, False),
            "prefill": (np.bool_, False),
            "decode_or_both": (np.bool_, False),
            "decode_only": (np.bool_, False),
            "total_blocks": (np.float64, np.inf),
            "seats": (np.float64, np.inf),
            "kv_bytes_per_token": (np.int64, UNKNOWN),
            "context_length": (np.int64, UNKNOWN),
            "prompt_tokens_min": (np.int64, 0),
            "prompt_tokens_max": (np.int64, INTEGER_MAX),
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
        """Resize to ``n_slots`` entries; the capacity grows and shrinks with them."""
        capacity = fit_capacity(len(self._full["present"]), n_slots)
        for name, (_, empty) in self._empty.items():
            full = self._full[name]
            if len(full) != capacity:
                self._full[name] = resized(full, capacity, empty)
        self._show(n_slots)

    def copy(self) -> "Columns":
        """Return a copy of all columns."""
        copied = Columns()
        copied._full = {name: full.copy() for name, full in self._full.items()}
        copied._show(len(self.present))
        return copied

    def write(self, slot: int, name: str, value: bool | int | float) -> None:
        """Set one entry."""
        self._full[name][slot] = value

    def clear(self, slot: int) -> None:
        """Reset every entry of ``slot`` to its empty value."""
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


UNKNOWN_VALUE: Final = -1
"""The id at slots without a value of the domain."""

_NO_SUCH_VALUE: Final = -2
_TAINT_COLUMNS_MAX: Final = 256


class DomainColumn:
    """The values of one domain over slots, as small ids; an id is reused once no slot has its value."""

    def __init__(self, n_slots: int) -> None:
        self._full = np.full(fit_capacity(_MIN_CAPACITY, n_slots), UNKNOWN_VALUE, np.int32)
        self._id_of: dict[str, int] = {}
        self._values: list[str] = []
        self._counts: list[int] = []
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._id_of)

    def copy(self) -> "DomainColumn":
        """Return a copy of the column."""
        copied = DomainColumn(0)
        copied._full = self._full.copy()
        copied._id_of, copied._values = dict(self._id_of), list(self._values)
        copied._counts, copied._free = list(self._counts), list(self._free)
        return copied

    @property
    def n_ids(self) -> int:
        """One more than the largest id."""
        return len(self._values)

    def id_of(self, value: str) -> int:
        """Return the id of ``value``; an id that no slot has when no worker has the value."""
        return self._id_of.get(value, _NO_SUCH_VALUE)

    def ids(self, n_slots: int) -> npt.NDArray[np.int32]:
        """Return a read-only array of the ids of the first ``n_slots`` slots."""
        shown = self._full[:n_slots]
        shown.flags.writeable = False
        return shown

    def value_at(self, slot: Slot) -> str | None:
        """Return the value at ``slot``; None when it has none."""
        at = int(self._full[slot])
        return None if at == UNKNOWN_VALUE else self._values[at]

    def resize(self, n_slots: int) -> None:
        """Resize to hold ``n_slots`` slots."""
        capacity = fit_capacity(len(self._full), n_slots)
        if capacity != len(self._full):
            self._full = resized(self._full, capacity, UNKNOWN_VALUE)

    def set(self, slot: Slot, value: str | None) -> None:
        """Set the value at ``slot``; None clears it."""
        before = int(self._full[slot])
        self._full[slot] = UNKNOWN_VALUE if value is None else self._take(value)
        if before != UNKNOWN_VALUE:
            self._give_back(before)

    def _take(self, value: str) -> int:
        at = self._id_of.get(value)
        if at is None:
            if self._free:
                at = self._free.pop()
                self._values[at] = value
            else:
                at = len(self._values)
                self._values.append(value)
                self._counts.append(0)
            self._id_of[value] = at
        self._counts[at] += 1
        return at

    def _give_back(self, at: int) -> None:
        self._counts[at] -= 1
        if self._counts[at] == 0:
            del self._id_of[self._values[at]]
            self._free.append(at)


class PlaceColumns:
    """The topology domains and the taints of each slot."""

    def __init__(self) -> None:
        self._n_slots = 0
        self._domains: dict[str, DomainColumn] = {}
        self._own_taints: defaultdict[Taint, set[Slot]] = defaultdict(set)
        self._taints_of: dict[Slot, frozenset[Taint]] = {}
        self._domains_of: dict[Slot, frozenset[str]] = {}
        self._taint_columns: dict[Taint, BoolColumn] = {}

    def copy(self) -> "PlaceColumns":
        """Return a copy of all domains and taints."""
        copied = PlaceColumns()
        copied._n_slots = self._n_slots
        copied._domains = {name: column.copy() for name, column in self._domains.items()}
        copied._own_taints.update({taint: set(slots) for taint, slots in self._own_taints.items()})
        copied._taints_of, copied._domains_of = dict(self._taints_of), dict(self._domains_of)
        copied._taint_columns = dict(self._taint_columns)
        return copied

    def resize(self, n_slots: int) -> None:
        """Resize to ``n_slots`` entries; the caller has emptied removed slots before."""
        self._n_slots = n_slots
        self._taint_columns.clear()
        for column in self._domains.values():
            column.resize(n_slots)

    def put(self, slot: Slot, domains: Mapping[str, str], own_taints: frozenset[Taint]) -> None:
        """Set the domains and own taints of ``slot``, in place of earlier ones."""
        for domain in self._domains_of.pop(slot, frozenset()) - domains.keys():
            self._domains[domain].set(slot, None)
            if not self._domains[domain]:
                del self._domains[domain]
        for domain, value in domains.items():
            column = self._domains.get(domain)
            if column is None:
                column = self._domains[domain] = DomainColumn(self._n_slots)
            column.set(slot, value)
        for taint in self._taints_of.pop(slot, frozenset()) - own_taints:
            self._own_taints[taint].discard(slot)
            if not self._own_taints[taint]:
                del self._own_taints[taint]
        for taint in own_taints:
            self._own_taints[taint].add(slot)
        if domains:
            self._domains_of[slot] = frozenset(domains)
        if own_taints:
            self._taints_of[slot] = own_taints
        self._taint_columns.clear()

    @property
    def domains(self) -> tuple[str, ...]:
        """The domains of which some worker has a value, sorted by name."""
        return tuple(sorted(self._domains))

    def n_ids(self, domain: str) -> int:
        """Return one more than the largest id in :meth:`ids`."""
        column = self._domains.get(domain)
        return 0 if column is None else column.n_ids

    def value_id(self, domain: str, value: str) -> int | None:
        """Return the id of a domain's value; None when no worker has the value."""
        column = self._domains.get(domain)
        at = -1 if column is None else column.id_of(value)
        return None if at < 0 else at

    def value_at(self, domain: str, slot: Slot) -> str | None:
        """Return the domain's value at ``slot``; None when it has none."""
        column = self._domains.get(domain)
        return None if column is None else column.value_at(slot)

    def ids(self, name: str) -> npt.NDArray[np.int32]:
        """Return the ids of the domain's values over slots; ``UNKNOWN_VALUE`` at slots without a value."""
        column = self._domains.get(name)
        if column is None:
            return np.full(self._n_slots, UNKNOWN_VALUE, np.int32)
        return column.ids(self._n_slots)

    def carries(self, taint: Taint) -> BoolColumn:
        """Return the slots that carry ``taint``, as an own taint or derived from a domain."""
        found = self._taint_columns.get(taint)
        if found is not None:
            return found
        if len(self._taint_columns) >= _TAINT_COLUMNS_MAX:
            self._taint_columns.clear()
        built = self._build(taint)
        built.flags.writeable = False
        self._taint_columns[taint] = built
        return built

    def _build(self, taint: Taint) -> BoolColumn:
        named = named_domain(taint)
        if named is not None:
            domain, value = named
            column = self._domains.get(domain)
            at = _NO_SUCH_VALUE if column is None else column.id_of(value)
            return np.equal(self.ids(domain), at)
        carried = np.zeros(self._n_slots, np.bool_)
        carried[list(self._own_taints.get(taint, ()))] = True
        return carried


class Policies:
    """Prefill slots by their worker's own transfer policy; None is the key of workers without one."""

    def __init__(self) -> None:
        self._slots: dict[TransferPolicy | None, set[Slot]] = {}
        self._policy_of: dict[Slot, TransferPolicy | None] = {}

    def __iter__(self) -> Iterator[tuple[TransferPolicy | None, SlotColumn]]:
        for policy, slots in self._slots.items():
            yield policy, np.fromiter(slots, np.intp, len(slots))

    def copy(self) -> "Policies":
        """Return a copy of all policies."""
        copied = Policies()
        copied._slots = {policy: set(slots) for policy, slots in self._slots.items()}
        copied._policy_of = dict(self._policy_of)
        return copied

    @property
    def required_domain(self) -> str | None:
        """The first domain, by name, that some policy requires; None if no policy requires one."""
        domains = (policy.domain for policy in self._slots if isinstance(policy, Required))
        return min(domains, default=None)

    def put(self, slot: Slot, policy: TransferPolicy | None) -> None:
        """Add ``slot`` as a prefill slot with this policy, in place of an earlier one."""
        self.remove(slot)
        self._policy_of[slot] = policy
        self._slots.setdefault(policy, set()).add(slot)

    def remove(self, slot: Slot) -> None:
        """Remove ``slot`` if it is a prefill slot."""
        if slot not in self._policy_of:
            return
        policy = self._policy_of.pop(slot)
        self._slots[policy].discard(slot)
        if not self._slots[policy]:
            del self._slots[policy]


def hash_rank(rank: WorkerRank) -> int:
    """Return a 64-bit hash of the worker rank."""
    return mix64(mix64(rank.worker_id) ^ rank.dp_rank)

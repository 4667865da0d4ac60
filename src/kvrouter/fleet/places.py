"""Domain values and taints over slots. Memory is linear in slots, however many values there are."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from kvrouter.core.ids import Slot, Taint
from kvrouter.fleet.columns import BoolColumn, fit_capacity, resized
from kvrouter.topology.taints import named_domain

UNKNOWN_VALUE: Final = -1
"""The id of a domain's value where the worker has none."""

_NO_SUCH_VALUE: Final = -2
_MIN_CAPACITY: Final = 16
_TAINT_COLUMNS_MAX: Final = 256


class DomainColumn:
    """The values of one domain over slots, as small ids; an id is free again when its last slot leaves."""

    def __init__(self, n_slots: int) -> None:
        self._full = np.full(fit_capacity(_MIN_CAPACITY, n_slots), UNKNOWN_VALUE, np.int32)
        self._id_of: dict[str, int] = {}
        self._values: list[str] = []
        self._counts: list[int] = []
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._id_of)

    @property
    def n_ids(self) -> int:
        """One more than the largest id in use."""
        return len(self._values)

    def id_of(self, value: str) -> int:
        """Return the id of ``value``; an id that no slot has when no worker is there."""
        return self._id_of.get(value, _NO_SUCH_VALUE)

    def ids(self, n_slots: int) -> npt.NDArray[np.int32]:
        """Return the ids of the first ``n_slots`` slots, for reading."""
        shown = self._full[:n_slots]
        shown.flags.writeable = False
        return shown

    def value_at(self, slot: Slot) -> str | None:
        """Return the value at ``slot``."""
        at = int(self._full[slot])
        return None if at == UNKNOWN_VALUE else self._values[at]

    def resize(self, n_slots: int) -> None:
        """Have room for ``n_slots`` slots."""
        capacity = fit_capacity(len(self._full), n_slots)
        if capacity != len(self._full):
            self._full = resized(self._full, capacity, UNKNOWN_VALUE)

    def set(self, slot: Slot, value: str | None) -> None:
        """Give ``slot`` this value, or none."""
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


class Places:
    """Where the slots are, and which taints they carry."""

    def __init__(self) -> None:
        self._n_slots = 0
        self._domains: dict[str, DomainColumn] = {}
        self._own_taints: defaultdict[Taint, set[Slot]] = defaultdict(set)
        self._taints_of: dict[Slot, frozenset[Taint]] = {}
        self._domains_of: dict[Slot, frozenset[str]] = {}
        self._taint_columns: dict[Taint, BoolColumn] = {}

    def resize(self, n_slots: int) -> None:
        """Have ``n_slots`` entries; slots beyond have been emptied before."""
        self._n_slots = n_slots
        self._taint_columns.clear()
        for column in self._domains.values():
            column.resize(n_slots)

    def put(self, slot: Slot, domains: Mapping[str, str], own_taints: frozenset[Taint]) -> None:
        """Say where ``slot`` is and what it carries, in place of what was said before."""
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

    def domain(self, name: str) -> DomainColumn | None:
        """Return the column of one domain; None when no worker has a value of it."""
        return self._domains.get(name)

    def ids(self, name: str) -> npt.NDArray[np.int32]:
        """Return the value ids of one domain over slots."""
        column = self._domains.get(name)
        if column is None:
            return np.full(self._n_slots, UNKNOWN_VALUE, np.int32)
        return column.ids(self._n_slots)

    def carries(self, taint: Taint) -> BoolColumn:
        """Return which slots carry ``taint``, whether their own or made from a domain."""
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

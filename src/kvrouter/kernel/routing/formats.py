"""KV formats: which decode ranks can take the KV of which prefill ranks, and what a split of them costs."""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from kvrouter.core.ids import Slot
from kvrouter.core.workers import KvFormat, Role, can_transfer
from kvrouter.kernel.fleet.columns import BoolColumn
from kvrouter.kernel.fleet.fleet import Fleet


class FormatGroup(NamedTuple):
    """The prefill ranks, alive or not, whose KV the same decode ranks can take, and these."""

    senders: BoolColumn
    receivers: BoolColumn


def format_groups(fleet: Fleet) -> tuple[FormatGroup, ...]:
    """Return all prefill ranks in groups; empty when every decode rank can take all KV."""
    return fleet.derived_from_places(_format_groups, None)


def takers_of(groups: Sequence[FormatGroup], sender: Slot) -> BoolColumn | None:
    """Return the decode ranks that can take the KV of one prefill rank; None without groups."""
    return next((each.receivers for each in groups if each.senders[sender]), None)


def _format_groups(fleet: Fleet, _: None) -> tuple[FormatGroup, ...]:
    sent: dict[KvFormat, list[Slot]] = {}
    taken: dict[KvFormat, list[Slot]] = {}
    for card in fleet:
        side = sent if card.role is Role.PREFILL else taken
        side.setdefault(card.runtime_config.kv_format, []).extend(fleet.slots_of(card.worker_id))
    senders: dict[tuple[KvFormat, ...], list[Slot]] = {}
    for own, slots in sent.items():
        takers = tuple(other for other in taken if can_transfer(own, other))
        senders.setdefault(takers, []).extend(slots)
    if senders.keys() <= {tuple(taken)}:
        return ()
    return tuple(
        FormatGroup(
            _column(fleet, slots), _column(fleet, chain.from_iterable(taken[each] for each in takers))
        )
        for takers, slots in senders.items()
    )


def _column(fleet: Fleet, slots: Iterable[Slot]) -> BoolColumn:
    column = np.zeros(fleet.n_slots, np.bool_)
    column[list(slots)] = True
    return column

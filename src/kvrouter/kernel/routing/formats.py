"""KV formats: which decode ranks can take the KV of which prefill ranks, and what a split of them costs."""

from collections.abc import Iterable, Sequence
from itertools import chain, product
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


def takers_of_format(fleet: Fleet, kv_format: KvFormat) -> BoolColumn | None:
    """Return the decode ranks that can take KV of this format; None when all can."""
    return fleet.derived_from_places(_takers_of_format, kv_format)


def partner_ranks(
    groups: Sequence[FormatGroup], slot: Slot, senders: BoolColumn, receivers: BoolColumn
) -> int:
    """Count the ranks of ``receivers`` that can take the KV of the rank at ``slot``, or those of ``senders``
    whose KV it can take.
    """
    takers = takers_of(groups, slot)
    if takers is not None:
        return int(np.count_nonzero(takers & receivers))
    return sum(int(np.count_nonzero(each.senders & senders)) for each in groups if each.receivers[slot])


CUT_GROUPS_MAX = 8
"""The most groups, the largest, that :func:`pair_capacity` counts."""


def pair_capacity(groups: Sequence[FormatGroup], senders: BoolColumn, receivers: BoolColumn) -> float:
    """Return the share of the capacity of pairs that is left when KV stays in its groups, 1 without groups or
    without a rank of either role; with more than :data:`CUT_GROUPS_MAX` groups at least that.

    Ranks of one role count alike, and both roles as equally busy. It is the largest flow of the senders'
    shares into the receivers' shares, which is the smallest cut between them.
    """
    if not (groups and senders.any() and receivers.any()):
        return 1.0
    sides = [(int(np.count_nonzero(each.senders & senders)), each.receivers & receivers) for each in groups]
    sides = sorted(sides, key=lambda side: side[0])[-CUT_GROUPS_MAX:]
    n_senders, n_receivers = (int(np.count_nonzero(each)) for each in (senders, receivers))
    least = 1.0
    for cut in product((False, True), repeat=len(sides)):
        sent, reached = 0, np.zeros(len(receivers), np.bool_)
        for (n_sent, takers), is_cut in zip(sides, cut, strict=True):
            if is_cut:
                sent += n_sent
            else:
                reached |= takers
        least = min(least, sent / n_senders + int(np.count_nonzero(reached)) / n_receivers)
    return least


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


def _takers_of_format(fleet: Fleet, kv_format: KvFormat) -> BoolColumn | None:
    receivers = [card for card in fleet if card.role is not Role.PREFILL]
    takers = [card for card in receivers if can_transfer(kv_format, card.runtime_config.kv_format)]
    if len(takers) == len(receivers):
        return None
    return _column(fleet, chain.from_iterable(fleet.slots_of(card.worker_id) for card in takers))


def _column(fleet: Fleet, slots: Iterable[Slot]) -> BoolColumn:
    column = np.zeros(fleet.n_slots, np.bool_)
    column[list(slots)] = True
    return column

"""KV formats: which decode ranks can take the KV of which prefill ranks, and what a split of them costs.

Two workers cannot if their formats differ, or if their engines refused each other: then no workers of these
two builds can, once several workers of each have shown it, and the two builds are not one.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, product
from typing import NamedTuple

import numpy as np

from kvrouter.core.ids import Slot, WorkerId
from kvrouter.core.workers import KvFormat, KvPeer, Role, can_transfer
from kvrouter.kernel.fleet.circuit import Pair
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


def takers_of_peer(fleet: Fleet, sender: KvPeer | None) -> BoolColumn | None:
    """Return the decode ranks that can take the KV of a worker, here or gone; None when all can, or when it
    is unknown.
    """
    return None if sender is None else fleet.derived_from_places(_takers_of_peer, sender)


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


Build = tuple[str, KvFormat]
ANY_WORKER = WorkerId(-1)


class _Refusals(NamedTuple):
    """The pairs that refused each other, True for those that a request may try again; their workers; and the
    builds of which no workers are a pair.
    """

    pairs: Mapping[Pair, bool]
    workers: frozenset[WorkerId]
    builds: frozenset[tuple[Build, Build]]

    def kind_of(self, peer: KvPeer) -> KvPeer:
        """Return the same for all workers that the same workers can hand KV to, and take it from."""
        if not self.pairs:
            return KvPeer(ANY_WORKER, "", peer.kv_format)
        return peer if peer.worker_id in self.workers else peer._replace(worker_id=ANY_WORKER)

    def can_hand_over(self, sender: KvPeer, receiver: KvPeer) -> bool:
        """Whether KV can go from the one to the other."""
        if not can_transfer(sender.kv_format, receiver.kv_format):
            return False
        is_tried = self.pairs.get(Pair(sender.worker_id, receiver.worker_id))
        return (_build_of(sender), _build_of(receiver)) not in self.builds if is_tried is None else is_tried


def _build_of(peer: KvPeer) -> Build:
    return peer.engine, peer.kv_format


def _refusals(fleet: Fleet, _: None) -> _Refusals:
    of_builds: dict[tuple[Build, Build], list[Pair]] = {}
    for pair in fleet.refusing_pairs:
        sender, receiver = fleet.card(pair.prefill), fleet.card(pair.decode)
        if sender is not None and receiver is not None:
            builds = _build_of(sender.kv_peer), _build_of(receiver.kv_peer)
            of_builds.setdefault(builds, []).append(pair)
    return _Refusals(
        fleet.refusing_pairs,
        frozenset(chain.from_iterable(fleet.refusing_pairs)),
        frozenset(
            builds
            for builds, pairs in of_builds.items()
            if builds[0] != builds[1] and all(len(set(side)) > 1 for side in zip(*pairs, strict=True))
        ),
    )


def _format_groups(fleet: Fleet, _: None) -> tuple[FormatGroup, ...]:
    refusals = fleet.derived_from_places(_refusals, None)
    sent: dict[KvPeer, list[Slot]] = {}
    taken: dict[KvPeer, list[Slot]] = {}
    for card in fleet:
        side = sent if card.role is Role.PREFILL else taken
        side.setdefault(refusals.kind_of(card.kv_peer), []).extend(fleet.slots_of(card.worker_id))
    senders: dict[tuple[KvPeer, ...], list[Slot]] = {}
    for own, slots in sent.items():
        takers = tuple(other for other in taken if refusals.can_hand_over(own, other))
        senders.setdefault(takers, []).extend(slots)
    if senders.keys() <= {tuple(taken)}:
        return ()
    return tuple(
        FormatGroup(
            _column(fleet, slots), _column(fleet, chain.from_iterable(taken[each] for each in takers))
        )
        for takers, slots in senders.items()
    )


def _takers_of_peer(fleet: Fleet, sender: KvPeer) -> BoolColumn | None:
    refusals = fleet.derived_from_places(_refusals, None)
    receivers = [card for card in fleet if card.role is not Role.PREFILL]
    takers = [card for card in receivers if refusals.can_hand_over(sender, card.kv_peer)]
    if len(takers) == len(receivers):
        return None
    return _column(fleet, chain.from_iterable(fleet.slots_of(card.worker_id) for card in takers))


def _column(fleet: Fleet, slots: Iterable[Slot]) -> BoolColumn:
    column = np.zeros(fleet.n_slots, np.bool_)
    column[list(slots)] = True
    return column

"""Every candidate of a leg as a row, read off the columns that the pick was made from."""

from collections.abc import Iterable

import numpy as np

from kvrouter.core.errors import Reason
from kvrouter.core.ids import Slot
from kvrouter.core.requests import Leg
from kvrouter.fleet import Fleet
from kvrouter.routing.cost import Costs
from kvrouter.routing.decision import Candidate, Pick
from kvrouter.routing.eligibility import Screen, Stopped


def pick_at(slot: Slot, leg: Leg, fleet: Fleet, costs: Costs, candidates: int, *, unseen: int = 0) -> Pick:
    """Return the pick of ``slot``."""
    rank = fleet.rank_at(slot)
    if rank is None:
        raise ValueError(f"slot {slot} is free")
    overlap, prefill, decode, transfer, multiplier, cost = costs
    return Pick(
        slot=slot,
        rank=rank,
        leg=leg,
        overlap_blocks=0 if overlap is None else overlap.item(slot),
        prefill_blocks=0.0 if prefill is None else prefill.item(slot),
        decode_blocks=0.0 if decode is None else decode.item(slot),
        transfer_blocks=0.0 if transfer is None else transfer.item(slot),
        multiplier=1.0 if multiplier is None else multiplier.item(slot),
        cost=cost.item(slot),
        candidates=candidates,
        unseen=unseen,
    )


def rows_of(
    who: Screen, fleet: Fleet, stopped: Iterable[Stopped], costs: Costs, picked: Slot | None
) -> tuple[Candidate, ...]:
    """Return a row for each rank of the leg's role and for whoever else was ``stopped``, in their order.

    A refusal has nobody ``picked``.
    """
    asked = who.role.copy()
    refused_for: dict[int, Reason] = {}
    for reason, slots in stopped:
        asked |= slots
        refused_for.update(dict.fromkeys(np.flatnonzero(slots).tolist(), reason))
    rows = []
    for slot in map(Slot, fleet.rank_order[asked[fleet.rank_order]].tolist()):
        pick = pick_at(slot, who.leg, fleet, costs, 0)
        rows.append(
            Candidate(
                slot=slot,
                rank=pick.rank,
                leg=pick.leg,
                overlap_blocks=pick.overlap_blocks,
                prefill_blocks=pick.prefill_blocks,
                decode_blocks=pick.decode_blocks,
                transfer_blocks=pick.transfer_blocks,
                multiplier=pick.multiplier,
                cost=pick.cost,
                refused=refused_for.get(slot),
                picked=slot == picked,
            )
        )
    return tuple(rows)

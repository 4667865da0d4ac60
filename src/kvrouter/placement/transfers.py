"""The KV that placed requests have still to move, over each link that transfers share."""

from typing import NamedTuple

from kvrouter.core.ids import Slot
from kvrouter.fleet import Fleet
from kvrouter.routing.links import kv_bytes_per_token, links_of
from kvrouter.topology import LinkLoads, LinkTable, SharedLink


class Transfer(NamedTuple):
    """What one request has to move; ``link`` is None where nobody knows what it shares."""

    link: SharedLink | None
    bytes: float


class Transfers:
    """Counts a transfer from the decision for a pair to its first token."""

    def __init__(self) -> None:
        self.loads = LinkLoads()

    def begin(self, fleet: Fleet, table: LinkTable, prefill: Slot, decode: Slot, tokens: int) -> Transfer:
        """So many tokens of KV will travel from one worker to the other."""
        link = links_of(fleet, table).shared(prefill, decode)
        transfer = Transfer(link, float(tokens * kv_bytes_per_token(fleet, prefill)))
        if link is not None:
            self.loads.add(link, transfer.bytes)
        return transfer

    def end(self, transfer: Transfer) -> None:
        """It arrived, or never will."""
        if transfer.link is not None:
            self.loads.remove(transfer.link, transfer.bytes)

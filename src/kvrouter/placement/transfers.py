"""The KV that placed requests have still to move, over each link that transfers share."""

from typing import NamedTuple

from kvrouter.core.ids import Slot
from kvrouter.fleet import Fleet
from kvrouter.routing.links import shared_from
from kvrouter.topology import LinkLoads, LinkTable

LINKS_MAX = 65_536
"""So many links are numbered before the numbers begin again, as soon as nothing travels."""


class Transfer(NamedTuple):
    """What one request has to move, over the link of this number."""

    link: int
    bytes: float


class Transfers:
    """Counts a transfer from the decision for a pair to its first token."""

    def __init__(self) -> None:
        self.loads = LinkLoads()
        self._open = 0

    def begin(self, fleet: Fleet, table: LinkTable, prefill: Slot, decode: Slot, tokens: int) -> Transfer:
        """So many tokens of KV will travel from one worker to the other."""
        if self._open == 0 and len(self.loads) > LINKS_MAX:
            self.loads = LinkLoads()
        link = int(shared_from(fleet, table, prefill, self.loads)[decode])
        transfer = Transfer(link, float(tokens * max(0, int(fleet.columns.kv_bytes_per_token[prefill]))))
        self._open += 1
        self.loads.add(*transfer)
        return transfer

    def end(self, transfer: Transfer) -> None:
        """It arrived, or never will."""
        self._open -= 1
        self.loads.remove(*transfer)

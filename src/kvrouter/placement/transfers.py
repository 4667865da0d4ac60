"""The KV that placed requests have still to move, and is on its way, over each link that transfers share."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from kvrouter.core.ids import Slot
from kvrouter.fleet import Fleet, IntColumn
from kvrouter.placement.link_speeds import LearnedLinks, LinkListener, Seen
from kvrouter.routing.links import kv_bytes_per_token, links_of
from kvrouter.topology import Link, LinkState, LinkTable, SharedLink


@dataclass(slots=True, eq=False)
class Transfer:
    """What one request has to move. ``link`` is None where nobody knows what it shares, ``table`` is what is
    given of it. ``began_s`` is when its prefill was done, None before that; ``sharing_bytes`` what it
    shared its link with then.
    """

    link: SharedLink | None
    table: Link
    bytes: float
    to: Slot
    began_s: float | None = None
    sharing_bytes: float = 0.0
    is_clear: bool = True
    """Whether nothing but the link decides how long it takes."""


class Transfers:
    """Counts a transfer from the decision for a pair to its first token, and learns from what it took."""

    def __init__(self, listener: LinkListener) -> None:
        self.state = LinkState()
        self.learned = LearnedLinks(self.state, listener)
        self._moving: defaultdict[SharedLink | None, list[Transfer]] = defaultdict(list)
        self._refreshed_s = 0.0

    def begin(self, fleet: Fleet, table: LinkTable, prefill: Slot, decode: Slot, tokens: int) -> Transfer:
        """So many tokens of KV will travel from one worker to the other."""
        links = links_of(fleet, table)
        link = links.shared(prefill, decode)
        kv_bytes = float(tokens * kv_bytes_per_token(fleet, prefill))
        transfer = Transfer(link, links.link(prefill, decode), kv_bytes, decode)
        if link is not None:
            self.state.add(link, kv_bytes)
        return transfer

    def moves(self, transfer: Transfer, *, now_s: float) -> None:
        """The prompt is prefilled: its KV may travel from now on."""
        if transfer.began_s is None:
            transfer.began_s = now_s
            transfer.sharing_bytes = self._sharing(transfer)
            self._moving[transfer.link].append(transfer)

    def arrived(self, transfer: Transfer, *, steps_s: float, now_s: float) -> None:
        """The first token came after it, for which the decode worker's steps took ``steps_s``."""
        if transfer.began_s is not None and transfer.bytes > 0.0 and transfer.is_clear:
            self.learned.note(self._seen(transfer, now_s, steps_s))
        self.end(transfer)

    def end(self, transfer: Transfer) -> None:
        """It arrived, or never will."""
        moving = self._moving.get(transfer.link)
        if moving is not None and transfer in moving:
            moving.remove(transfer)
            if not moving:
                del self._moving[transfer.link]
        if transfer.link is not None:
            self.state.remove(transfer.link, transfer.bytes)

    def refresh(self, prefill_tokens: IntColumn, *, now_s: float) -> None:
        """Let links have the pace that is known of them now, a few times a second. Transfers to ranks that
        prefill meanwhile, by the tokens that are queued there, say nothing of links.
        """
        if now_s - self._refreshed_s >= REFRESH_S or now_s < self._refreshed_s:
            self._refreshed_s = now_s
            self.learned.refresh(self._on_the_way(prefill_tokens, now_s), now_s=now_s)

    def _on_the_way(self, prefill_tokens: IntColumn, now_s: float) -> Iterator[Seen]:
        for transfers in self._moving.values():
            for transfer in transfers:
                if prefill_tokens[transfer.to] > 0:
                    transfer.is_clear = False
                if transfer.is_clear:
                    yield self._seen(transfer, now_s, 0.0)

    def _seen(self, transfer: Transfer, now_s: float, steps_s: float) -> Seen:
        """What a transfer took so far, and what it would take by the table with what it shares its link
        with: the mean of its begin and of now.
        """
        began_s = now_s if transfer.began_s is None else transfer.began_s
        sharing = (transfer.sharing_bytes + self._sharing(transfer)) / 2
        table = transfer.table
        return Seen(
            link=transfer.link,
            table=table,
            at_s=now_s,
            plain_s=(transfer.bytes + sharing) / table.bandwidth_bytes_per_s,
            seen_s=max(0.0, now_s - began_s - steps_s - table.latency_s),
        )

    def _sharing(self, transfer: Transfer) -> float:
        """What travels with it, of which it waits for no more than its own bytes each."""
        moving = self._moving.get(transfer.link, ()) if transfer.link is not None else ()
        return sum(min(each.bytes, transfer.bytes) for each in moving if each is not transfer)


REFRESH_S = 0.1

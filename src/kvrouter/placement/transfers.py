"""The KV that placed requests have still to move, and is on its way, over each link that transfers share."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from kvrouter.core.ids import Slot
from kvrouter.fleet import Fleet
from kvrouter.placement.link_speeds import LearnedLinks, LinkListener, Seen
from kvrouter.routing.links import kv_bytes_per_token, links_of
from kvrouter.topology import Link, LinkState, LinkTable, SharedLink

REFRESH_S = 0.1
"""Paces are looked at again after so long, when a decision asks for them."""

LOOKED_AT_MAX = 16
"""So many transfers of one link, the oldest ones, are looked at while they are on their way."""


@dataclass(slots=True, eq=False)
class Transfer:
    """What one request has to move. ``link`` is None where nobody knows what it shares, ``table`` is what is
    given of it. ``began_s`` is when its prefill was done, None before that and where that is not known;
    ``sharing_bytes`` what it shared its link with then, ``steps_s`` what the decode worker's step takes.
    """

    link: SharedLink | None
    table: Link
    bytes: float
    to: Slot
    began_s: float | None = None
    sharing_bytes: float = 0.0
    steps_s: float = 0.0
    is_clear: bool = True
    """Whether nothing but the link decides how long it takes."""
    tables: int = 0
    """How many tables there were before the one that ``table`` is of."""


@dataclass(slots=True)
class _Moving:
    """What is on its way over one link, the oldest first."""

    transfers: dict[Transfer, None] = field(default_factory=dict)
    bytes: float = 0.0


class Transfers:
    """Counts a transfer from the decision for a pair to its first token, and learns from what it took."""

    def __init__(self, listener: LinkListener) -> None:
        self.state = LinkState()
        self.learned = LearnedLinks(self.state, listener)
        self._moving: dict[SharedLink | None, _Moving] = {}
        self._refreshed_s = 0.0
        self._tables = 0

    def forget(self) -> None:
        """Links have another table from now on: what was learned was over the one before."""
        self._tables += 1
        self.learned.forget()
        for moving in self._moving.values():
            for transfer in moving.transfers:
                transfer.is_clear = False

    def begin(self, fleet: Fleet, table: LinkTable, prefill: Slot, decode: Slot, tokens: int) -> Transfer:
        """So many tokens of KV will travel from one worker to the other."""
        links = links_of(fleet, table)
        link = links.shared(prefill, decode)
        kv_bytes = float(tokens * kv_bytes_per_token(fleet, prefill))
        given = links.link(prefill, decode)
        transfer = Transfer(link, given, kv_bytes, decode, tables=self._tables)
        if link is not None:
            self.state.add(link, kv_bytes)
        return transfer

    def moves(self, transfer: Transfer, *, is_clear: bool, steps_s: float, now_s: float) -> None:
        """The prompt is prefilled: its KV may travel from now on, to where a step takes ``steps_s``."""
        if transfer.began_s is None:
            transfer.began_s, transfer.steps_s = now_s, steps_s
            transfer.is_clear = is_clear and transfer.tables == self._tables
            transfer.sharing_bytes = self._sharing(transfer)
            moving = self._moving.setdefault(transfer.link, _Moving())
            moving.transfers[transfer] = None
            moving.bytes += transfer.bytes

    def arrived(self, transfer: Transfer, *, is_clear: bool, steps_s: float, now_s: float) -> None:
        """The first token came after it, for which the decode worker's step took ``steps_s``."""
        if transfer.began_s is not None and transfer.is_clear and is_clear:
            seen = self._seen(transfer, transfer.began_s, now_s, steps_s)
            if seen.seen_s > 0.0:
                self.learned.note(seen)
        self.end(transfer)

    def end(self, transfer: Transfer) -> None:
        """It arrived, or never will."""
        moving = self._moving.get(transfer.link)
        if moving is not None and transfer in moving.transfers:
            del moving.transfers[transfer]
            moving.bytes -= transfer.bytes
            if not moving.transfers:
                del self._moving[transfer.link]
        if transfer.link is not None:
            self.state.remove(transfer.link, transfer.bytes)

    def refresh(self, is_clear: Callable[[Slot], bool], *, now_s: float) -> None:
        """Let links have the pace that is known of them now, a few times a second. Transfers to ranks that
        are not clear meanwhile say nothing of links.
        """
        if now_s - self._refreshed_s >= REFRESH_S or now_s < self._refreshed_s:
            self._refreshed_s = now_s
            self.learned.refresh(self._on_the_way(is_clear, now_s), now_s=now_s)

    def _on_the_way(self, is_clear: Callable[[Slot], bool], now_s: float) -> Iterator[Seen]:
        for moving in self._moving.values():
            for transfer in islice(moving.transfers, LOOKED_AT_MAX):
                transfer.is_clear = transfer.is_clear and is_clear(transfer.to)
                if transfer.is_clear and transfer.began_s is not None:
                    # the step that runs there ends first, and its own follows
                    yield self._seen(transfer, transfer.began_s, now_s, 2 * transfer.steps_s)

    def _seen(self, transfer: Transfer, began_s: float, now_s: float, steps_s: float) -> Seen:
        """What a transfer took so far, and what it would take by the table with what it shares its link
        with: the mean of its begin and of now.
        """
        sharing = (transfer.sharing_bytes + self._sharing(transfer)) / 2
        table = transfer.table
        return Seen(
            link=transfer.link,
            table=table,
            to=transfer.to,
            began_s=began_s,
            at_s=now_s,
            plain_s=(transfer.bytes + sharing) / table.bandwidth_bytes_per_s,
            seen_s=max(0.0, now_s - began_s - steps_s - table.latency_s),
        )

    def _sharing(self, transfer: Transfer) -> float:
        """What travels with it, of which it waits for no more than as many bytes as its own for each."""
        moving = None if transfer.link is None else self._moving.get(transfer.link)
        if moving is None:
            return 0.0
        is_there = transfer in moving.transfers
        n_others = len(moving.transfers) - is_there
        return min(moving.bytes - is_there * transfer.bytes, n_others * transfer.bytes)

"""The KV that placed requests have still to move, and is on its way, over each link that transfers share."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from kvrouter.core.ids import RouterId, Slot
from kvrouter.core.sync import LINK_NEWS_MAX, LinkNews, LinkSeen, LinkUse
from kvrouter.kernel.fleet.fleet import Fleet
from kvrouter.kernel.placement.engine_sums import EngineSums
from kvrouter.kernel.placement.events import PlacementEvents
from kvrouter.kernel.placement.link_journal import LinkJournal, OnLink, as_message, as_seen
from kvrouter.kernel.placement.link_speeds import FIT_TRANSFERS, LearnedLinks, Seen
from kvrouter.kernel.routing.links import kv_bytes_per_token, links_of
from kvrouter.kernel.topology.links import NO_LOAD, Link, LinkLoad, LinkState, LinkTable, SharedLink

REFRESH_S = 0.1
"""Paces are looked at again after so long, when a decision asks for them."""

LOOKED_AT_MAX = 16
"""So many transfers of one link, the oldest ones, are looked at while they are on their way."""

PAUSED_SHARE = 0.1
"""A transfer in which this process stood still for more than this share of it teaches nothing."""

SHARED_TRANSFERS_MAX = 1024
"""So many of the last transfers are sent to a router that starts."""

HEARD_MAX = 16_384
"""So many transfers of other routers are known by name."""

NEWS_LASTS_S = 3.0
"""What another router puts on links counts for so long after it said so; it says so every second."""


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
    paused_s: float = 0.0
    """How long this process stood still meanwhile: so much later it may have heard of the arrival."""
    tables: int = 0
    """How many tables there were before the one that ``table`` is of."""


@dataclass(slots=True)
class _Moving:
    """What is on its way over one link, the oldest first."""

    transfers: dict[Transfer, None] = field(default_factory=dict)
    bytes: float = 0.0


class _Others(NamedTuple):
    """What another router said last of what it puts on links, and when."""

    at_s: float
    uses: dict[SharedLink, LinkUse]


class Transfers:
    """Counts a transfer from the decision for a pair to its first token, and learns from what it took.

    ``table`` are the figures that are given of links; None while nobody weighs them.
    """

    def __init__(
        self, fleet: Fleet, events: PlacementEvents, table: LinkTable | None, router_id: RouterId
    ) -> None:
        self._fleet = fleet
        self._router_id = router_id
        self._n_seen = 0
        self._heard: dict[tuple[RouterId, int], None] = {}
        """Transfers of other routers that count already: more than one router may pass them on."""
        self.table = table
        self.state = LinkState()
        self.learned = LearnedLinks(self.state, events)
        self.engine_sums = EngineSums()
        self._moving: dict[SharedLink | None, _Moving] = {}
        self._refreshed_s = 0.0
        self._tables = 0
        self._journal: LinkJournal | None = None
        self.has_begun = False
        """Whether something was ever moved, or heard of: before that there is nothing to look at."""
        self._others: dict[RouterId, _Others] = {}
        self._others_moving: dict[SharedLink, LinkLoad] = {}

    def use(self, table: LinkTable | None) -> None:
        """Links have these figures from now on. What was learned over others is forgotten."""
        before, self.table = self.table, table
        if before is table or (before is not None and table is not None and table.says_as(before)):
            return
        self._tables += 1
        self._heard.clear()
        if self._journal is not None:
            self._journal = LinkJournal()
        self.learned.forget()
        for moving in self._moving.values():
            for transfer in moving.transfers:
                transfer.is_clear = False

    def begin(self, table: LinkTable, prefill: Slot, decode: Slot, tokens: int) -> Transfer:
        """So many tokens of KV will travel from one worker to the other."""
        links = links_of(self._fleet, table)
        link = links.shared(prefill, decode)
        kv_bytes = float(tokens * kv_bytes_per_token(self._fleet, prefill))
        given = links.link(prefill, decode)
        self.has_begun = True
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
        began_s = transfer.began_s
        is_timed = began_s is not None and transfer.paused_s <= PAUSED_SHARE * (now_s - began_s)
        if began_s is not None and is_timed and transfer.is_clear and is_clear:
            seen = self._seen(transfer, began_s, now_s, steps_s)
            if seen.seen_s > 0.0:
                self._n_seen += 1
                # what an engine takes for each transfer besides is learned, and no part of what it counts
                extra_s = self.state.pace_of_kind(seen.kind).extra_s
                took_s = max(0.0, seen.seen_s - extra_s) + transfer.table.latency_s
                self.engine_sums.saw(transfer.to, kv_bytes=transfer.bytes, seconds=took_s, now_s=now_s)
                seen = seen._replace(seen_by=self._router_id, number=self._n_seen)
                self.learned.note(seen)
                if self._journal is not None:
                    self._journal.saw(seen)
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

    def paused(self, seconds: float) -> None:
        """This process stood still for so long, just now."""
        for moving in self._moving.values():
            for transfer in moving.transfers:
                transfer.paused_s += seconds

    def refresh(self, is_clear: Callable[[Slot], bool], *, now_s: float) -> None:
        """Let links have the pace that is known of them now, a few times a second. Transfers to ranks that
        are not clear meanwhile say nothing of links.
        """
        if now_s - self._refreshed_s >= REFRESH_S or now_s < self._refreshed_s:
            self._refreshed_s = now_s
            self.learned.refresh(self._on_the_way(is_clear, now_s), now_s=now_s)
            if self._journal is not None:
                self._journal.look(self._on_links())

    def _on_the_way(self, is_clear: Callable[[Slot], bool], now_s: float) -> Iterator[Seen]:
        for moving in self._moving.values():
            for transfer in islice(moving.transfers, LOOKED_AT_MAX):
                transfer.is_clear = transfer.is_clear and is_clear(transfer.to)
                if transfer.is_clear and transfer.began_s is not None:
                    # the step that runs there ends first, and its own follows
                    besides_s = 2 * transfer.steps_s + transfer.paused_s
                    yield self._seen(transfer, transfer.began_s, now_s, besides_s)

    def _seen(self, transfer: Transfer, began_s: float, now_s: float, steps_s: float) -> Seen:
        """What a transfer took so far, and what it would take by the table with what it shares its link
        with: the mean of its begin and of now.
        """
        sharing = (transfer.sharing_bytes + self._sharing(transfer)) / 2
        table = transfer.table
        return Seen(
            link=transfer.link,
            table=table,
            began_s=began_s,
            at_s=now_s,
            plain_s=(transfer.bytes + sharing) / table.bandwidth_bytes_per_s,
            seen_s=max(0.0, now_s - began_s - steps_s - table.latency_s),
        )

    def _sharing(self, transfer: Transfer) -> float:
        """What travels with it, of which it waits for no more than as many bytes as its own for each."""
        if transfer.link is None:
            return 0.0
        kv_bytes, n = self._others_moving.get(transfer.link, NO_LOAD)
        moving = self._moving.get(transfer.link)
        if moving is not None:
            is_there = transfer in moving.transfers
            kv_bytes += moving.bytes - is_there * transfer.bytes
            n += len(moving.transfers) - is_there
        return min(kv_bytes, n * transfer.bytes)

    # Other routers

    def begin_sharing(self) -> None:
        """Collect what other routers will be sent."""
        self._journal = self._journal or LinkJournal()

    def take_news(self, router_id: RouterId, *, now_s: float) -> LinkNews | None:
        """Return what is new since the last time; None where nothing is, and where no links are given.

        What others put on links counts no longer when they fall silent.
        """
        for other in [other for other, said in self._others.items() if now_s - said.at_s > NEWS_LASTS_S]:
            self.router_gone(other)
        if self._journal is None:
            return None
        if not self._journal.n_looks:  # nothing was decided since, and what travels goes on
            self._journal.look(self._on_links())
        seen = tuple(as_message(each, now_s=now_s) for each in self._journal.take_seen())
        uses = self._journal.take_uses()
        if self.table is None or (not seen and uses is None):
            return None
        return LinkNews(router_id, self._fleet.model, self.table.digest(), seen, uses)

    def all_news(self, router_id: RouterId, *, now_s: float) -> Iterator[LinkNews]:
        """Yield the transfers that count, the oldest first."""
        if self.table is None:
            return
        digest, seen = self.table.digest(), self.learned.samples()[-SHARED_TRANSFERS_MAX:]
        for begin in range(0, len(seen), LINK_NEWS_MAX):
            piece = tuple(as_message(each, now_s=now_s) for each in seen[begin : begin + LINK_NEWS_MAX])
            yield LinkNews(router_id, self._fleet.model, digest, piece)

    def on_news(self, news: LinkNews, *, now_s: float, aged_s: float = 0.0) -> None:
        """Learn from what another router saw, or this one ``aged_s`` ago, and count what it puts on links.
        What it measures by other figures than this one says nothing here.
        """
        if self.table is None or news.table != self.table.digest():
            return
        self.has_begun = True
        found = [as_seen(each, now_s=now_s - aged_s) for each in news.seen if self._is_new(each)]
        for begin in range(0, len(found), FIT_TRANSFERS):
            piece = found[begin : begin + FIT_TRANSFERS]
            for seen in piece:
                self.learned.note(seen)
            self.learned.refresh((), now_s=piece[-1].at_s)  # else what follows looks like a change
        if news.uses is not None:
            before = self._others.get(news.router_id)
            said = self._others[news.router_id] = _Others(
                now_s, {SharedLink(*use.link): use for use in news.uses}
            )
            self._count_others(said.uses.keys() | (set() if before is None else before.uses.keys()))

    def _is_new(self, seen: LinkSeen) -> bool:
        name = (seen.seen_by, seen.number)
        if seen.seen_by == self._router_id or name in self._heard:
            return False
        self._heard[name] = None
        if len(self._heard) > HEARD_MAX:
            del self._heard[next(iter(self._heard))]
        return True

    def router_gone(self, router_id: RouterId) -> None:
        """A router ended: it puts nothing on links any more."""
        said = self._others.pop(router_id, None)
        if said is not None:
            self._count_others(said.uses.keys())

    def _count_others(self, links: Iterable[SharedLink]) -> None:
        for link in links:
            uses = [use for said in self._others.values() if (use := said.uses.get(link)) is not None]
            self._others_moving.pop(link, None)
            if not uses:
                self.state.set_others(link, None)
                continue
            self.state.set_others(
                link, LinkLoad(sum(use.bytes for use in uses), sum(use.transfers for use in uses))
            )
            self._others_moving[link] = LinkLoad(
                sum(use.moving_bytes for use in uses), sum(use.moving_transfers for use in uses)
            )

    def _on_links(self) -> Iterator[OnLink]:
        for link, load in self.state.own_loads():
            moving = self._moving.get(link)
            on_its_way = NO_LOAD if moving is None else LinkLoad(moving.bytes, len(moving.transfers))
            yield OnLink(link, load, on_its_way)

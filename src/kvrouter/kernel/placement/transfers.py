"""Pending and running KV transfers of placed requests, by shared link, and their measurement."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from kvrouter.core.ids import RouterId, Slot
from kvrouter.core.replica_messages import LINK_UPDATE_MAX, LinkSample, LinkUpdate, LinkUse
from kvrouter.kernel.fleet.fleet import Fleet
from kvrouter.kernel.placement.engine_sums import EngineSums
from kvrouter.kernel.placement.link_journal import LinkJournal, LinkTraffic, as_message, as_sample
from kvrouter.kernel.placement.link_speeds import FIT_TRANSFERS, LearnedLinks, TransferSample
from kvrouter.kernel.placement.placement_events import PlacementEvents
from kvrouter.kernel.routing.fleet_links import kv_bytes_per_token, links_of
from kvrouter.kernel.topology.link_table import NO_LOAD, Link, LinkLoad, LinkState, LinkTable, SharedLink

REFRESH_S = 0.1
"""The least time between two updates of paces, which decisions trigger."""

CHECKED_MAX = 16
"""The most transfers of one link, the oldest, that are checked while they are in progress."""

PAUSED_SHARE = 0.1
"""A transfer is not measured if this process was blocked for more than this share of it."""

SHARED_TRANSFERS_MAX = 1024
"""The most measured transfers that are sent to a router that starts."""

RECEIVED_MAX = 16_384
"""The most transfers of other routers that are remembered by id, to ignore repeated ones."""

UPDATE_LASTS_S = 3.0
"""How long another router's reported link loads count; it reports them every second."""


@dataclass(slots=True, eq=False)
class Transfer:
    """The KV transfer of one request. ``link`` is None when its shared link is unknown; ``table`` is its link
    in the link table. ``began_s`` is when its prefill ended, None before that and when unknown;
    ``sharing_bytes`` the other bytes on its link at that time; ``steps_s`` the seconds of the decode worker's
    step.
    """

    link: SharedLink | None
    table: Link
    bytes: float
    to: Slot
    began_s: float | None = None
    sharing_bytes: float = 0.0
    steps_s: float = 0.0
    is_clear: bool = True
    """Whether its duration depends on the link alone."""
    paused_s: float = 0.0
    """How long this process was blocked during the transfer, and may have noticed its end late."""
    tables: int = 0
    """The number of link tables before the current one, when it began."""


@dataclass(slots=True)
class _Moving:
    """The transfers in progress over one link, the oldest first."""

    transfers: dict[Transfer, None] = field(default_factory=dict)
    bytes: float = 0.0


class _LinkReport(NamedTuple):
    """Another router's last report of its link loads, and when it arrived."""

    at_s: float
    uses: dict[SharedLink, LinkUse]


class Transfers:
    """Tracks each transfer from the decision for a pair to its first token, and learns link speeds from it.

    ``table`` is the configured link table; None while links are not weighed.
    """

    def __init__(
        self, fleet: Fleet, events: PlacementEvents, table: LinkTable | None, router_id: RouterId
    ) -> None:
        self._fleet = fleet
        self._router_id = router_id
        self._n_samples = 0
        self._received: dict[tuple[RouterId, int], None] = {}
        """The ids of received transfers of other routers: several routers may forward the same one."""
        self.table = table
        self.state = LinkState()
        self.learned = LearnedLinks(self.state, events)
        self.learned.use(table)
        self.engine_sums = EngineSums()
        self._moving: dict[SharedLink | None, _Moving] = {}
        self._refreshed_s = 0.0
        self._tables = 0
        self._journal: LinkJournal | None = None
        self.has_begun = False
        """Whether a transfer was ever begun or reported; until then there is nothing to refresh."""
        self._others: dict[RouterId, _LinkReport] = {}
        self._others_moving: dict[SharedLink, LinkLoad] = {}

    def use(self, table: LinkTable | None) -> None:
        """Replace the link table. Speeds that were learned with another table are dropped."""
        before, self.table = self.table, table
        if before is table or (before is not None and table is not None and table.has_same_links(before)):
            return
        self._tables += 1
        self._received.clear()
        if self._journal is not None:
            self._journal = LinkJournal()
        self.learned.use(table)
        for moving in self._moving.values():
            for transfer in moving.transfers:
                transfer.is_clear = False

    def begin(self, table: LinkTable, prefill: Slot, decode: Slot, tokens: int) -> Transfer:
        """Add a KV transfer of ``tokens`` between two workers to the load of their link."""
        links = links_of(self._fleet, table)
        link = links.shared(prefill, decode)
        kv_bytes = float(tokens * kv_bytes_per_token(self._fleet, prefill))
        table_link = links.link(prefill, decode)
        self.has_begun = True
        transfer = Transfer(link, table_link, kv_bytes, decode, tables=self._tables)
        if link is not None:
            self.state.add(link, kv_bytes)
        return transfer

    def kv_ready(self, transfer: Transfer, *, is_clear: bool, steps_s: float, now_s: float) -> None:
        """Start a transfer after prefill; ``steps_s`` are the seconds of a decode step at its destination."""
        if transfer.began_s is None:
            transfer.began_s, transfer.steps_s = now_s, steps_s
            transfer.is_clear = is_clear and transfer.tables == self._tables
            transfer.sharing_bytes = self._sharing(transfer)
            moving = self._moving.setdefault(transfer.link, _Moving())
            moving.transfers[transfer] = None
            moving.bytes += transfer.bytes

    def arrived(self, transfer: Transfer, *, is_clear: bool, steps_s: float, now_s: float) -> None:
        """End a transfer at its first token, and measure it; the decode worker's step took ``steps_s``."""
        began_s = transfer.began_s
        is_timed = began_s is not None and transfer.paused_s <= PAUSED_SHARE * (now_s - began_s)
        if began_s is not None and is_timed and transfer.is_clear and is_clear:
            sample = self._sample(transfer, began_s, now_s, steps_s, number=self._n_samples + 1)
            if sample.seen_s > 0.0:
                self._n_samples += 1
                # an engine does not count the learned constant time of each transfer
                extra_s = self.state.pace_of_kind(sample.kind).extra_s
                took_s = max(0.0, sample.seen_s - extra_s) + transfer.table.latency_s
                self.engine_sums.observed(transfer.to, kv_bytes=transfer.bytes, seconds=took_s, now_s=now_s)
                self.learned.note(sample)
                if self._journal is not None:
                    self._journal.record(sample)
        self.end(transfer)

    def end(self, transfer: Transfer) -> None:
        """Remove a transfer from its link's load."""
        moving = self._moving.get(transfer.link)
        if moving is not None and transfer in moving.transfers:
            del moving.transfers[transfer]
            moving.bytes -= transfer.bytes
            if not moving.transfers:
                del self._moving[transfer.link]
        if transfer.link is not None:
            self.state.remove(transfer.link, transfer.bytes)

    def paused(self, seconds: float) -> None:
        """Record that this process was just blocked for so many ``seconds``."""
        for moving in self._moving.values():
            for transfer in moving.transfers:
                transfer.paused_s += seconds

    def refresh(self, is_clear: Callable[[Slot], bool], *, now_s: float) -> None:
        """Update the paces of links, at most every ``REFRESH_S``. Transfers to ranks that are not clear any
        longer are not measured.
        """
        if now_s - self._refreshed_s >= REFRESH_S or now_s < self._refreshed_s:
            self._refreshed_s = now_s
            self.learned.refresh(self._on_the_way(is_clear, now_s), now_s=now_s)
            if self._journal is not None:
                self._journal.sample_loads(self._on_links())

    def _on_the_way(self, is_clear: Callable[[Slot], bool], now_s: float) -> Iterator[TransferSample]:
        for moving in self._moving.values():
            for transfer in islice(moving.transfers, CHECKED_MAX):
                transfer.is_clear = transfer.is_clear and is_clear(transfer.to)
                if transfer.is_clear and transfer.began_s is not None:
                    # the running decode step ends first, and the request's first step follows
                    excluded_s = 2 * transfer.steps_s + transfer.paused_s
                    yield self._sample(transfer, transfer.began_s, now_s, excluded_s)

    def _sample(
        self, transfer: Transfer, began_s: float, now_s: float, steps_s: float, *, number: int = 0
    ) -> TransferSample:
        """Return a measurement of a transfer so far, with the time by the table given the mean of other bytes
        on its link at its start and now. ``number`` is 0 before its end.
        """
        sharing = (transfer.sharing_bytes + self._sharing(transfer)) / 2
        table = transfer.table
        return TransferSample(
            link=transfer.link,
            table=table,
            began_s=began_s,
            at_s=now_s,
            plain_s=(transfer.bytes + sharing) / table.bandwidth_bytes_per_s,
            seen_s=max(0.0, now_s - began_s - steps_s - table.latency_s),
            seen_by=self._router_id,
            number=number,
        )

    def _sharing(self, transfer: Transfer) -> float:
        """Return the other bytes in progress on its link, at most its own bytes for each other transfer."""
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
        """Start to collect updates for other routers."""
        self._journal = self._journal or LinkJournal()

    def take_update(self, router_id: RouterId, *, now_s: float) -> LinkUpdate | None:
        """Return the update since the last call; None when nothing changed, and without a link table.

        The reported loads of silent routers are dropped.
        """
        for other in [
            other for other, report in self._others.items() if now_s - report.at_s > UPDATE_LASTS_S
        ]:
            self.router_gone(other)
        if self._journal is None:
            return None
        if not self._journal.n_samples:  # transfers continue even if no decision was made since
            self._journal.sample_loads(self._on_links())
        samples = tuple(as_message(each, now_s=now_s) for each in self._journal.take_samples())
        uses = self._journal.take_uses()
        if self.table is None or (not samples and uses is None):
            return None
        return LinkUpdate(router_id, self._fleet.model, self.table.digest(), samples, uses)

    def all_updates(self, router_id: RouterId, *, now_s: float) -> Iterator[LinkUpdate]:
        """Yield the current measurements, the oldest first."""
        if self.table is None:
            return
        digest, samples = self.table.digest(), self.learned.samples()[-SHARED_TRANSFERS_MAX:]
        for begin in range(0, len(samples), LINK_UPDATE_MAX):
            piece = tuple(as_message(each, now_s=now_s) for each in samples[begin : begin + LINK_UPDATE_MAX])
            yield LinkUpdate(router_id, self._fleet.model, digest, piece)

    def on_link_update(self, update: LinkUpdate, *, now_s: float, aged_s: float = 0.0) -> None:
        """Learn from the measurements of another router, or of this one ``aged_s`` ago, and count its link
        loads. Updates with another link table are ignored.
        """
        if self.table is None or update.table != self.table.digest():
            return
        self.has_begun = True
        found = [as_sample(each, now_s=now_s - aged_s) for each in update.seen if self._is_new(each)]
        for begin in range(0, len(found), FIT_TRANSFERS):
            piece = found[begin : begin + FIT_TRANSFERS]
            for sample in piece:
                self.learned.note(sample)
            self.learned.refresh((), now_s=piece[-1].at_s)  # else what follows looks like a change
        if update.uses is not None:
            before = self._others.get(update.router_id)
            report = self._others[update.router_id] = _LinkReport(
                now_s, {SharedLink(*use.link): use for use in update.uses}
            )
            self._count_others(report.uses.keys() | (set() if before is None else before.uses.keys()))

    def _is_new(self, sample: LinkSample) -> bool:
        name = (sample.seen_by, sample.number)
        if sample.seen_by == self._router_id or name in self._received:
            return False
        self._received[name] = None
        if len(self._received) > RECEIVED_MAX:
            del self._received[next(iter(self._received))]
        return True

    def router_gone(self, router_id: RouterId) -> None:
        """Drop the link loads of a router that ended."""
        report = self._others.pop(router_id, None)
        if report is not None:
            self._count_others(report.uses.keys())

    def _count_others(self, links: Iterable[SharedLink]) -> None:
        for link in links:
            uses = [use for report in self._others.values() if (use := report.uses.get(link)) is not None]
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

    def _on_links(self) -> Iterator[LinkTraffic]:
        for link, load in self.state.own_loads():
            moving = self._moving.get(link)
            on_its_way = NO_LOAD if moving is None else LinkLoad(moving.bytes, len(moving.transfers))
            yield LinkTraffic(link, load, on_its_way)

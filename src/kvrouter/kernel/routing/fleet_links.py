"""The links between a fleet's slots: the duration and price of a KV transfer, among others on its link.

With n other transfers of B bytes in total on the link, which share its bandwidth evenly::

    transfer_s = latency_s + (kv_bytes + min(B, n · kv_bytes)) / bandwidth_bytes_per_s
    price_s    = price_weight · price_per_gb · kv_bytes / 10⁹
    kv_bytes   = (isl_tokens − tokens cached on the decode worker) · kv_bytes_per_token of the prefill worker

Other transfers and prices count only under the cost of time: the blocks rule weighs a transfer as if it were
alone. If the prefill worker does not publish its KV bytes per token, only the latency counts.
"""

import numpy as np

from kvrouter._native import LinkMap
from kvrouter.core.ids import Slot
from kvrouter.kernel.fleet.columns import UNKNOWN_VALUE, FloatColumn, IntColumn
from kvrouter.kernel.fleet.fleet import Fleet
from kvrouter.kernel.routing.interface import RouteRequest, View
from kvrouter.kernel.topology.link_table import (
    BYTES_PER_GB,
    Link,
    LinkKind,
    LinkLoad,
    LinkPace,
    LinkState,
    LinkTable,
    SharedLink,
)

NAMES_MAX = 65_536
"""The most cached numbers of links by name; they and the cached names are cleared beyond it."""


class FleetLinks:
    """The links of a link table between the slots of a fleet, valid until a card changes.

    Each link is ``table.link`` of two workers' domain values, by the levels of the first one. Transfers share
    it if they go between the same values of the level, or the domain, that decides it; if none does, of the
    broadest level in which the two differ, else of the narrowest that they share.
    """

    def __init__(self, fleet: Fleet, table: LinkTable) -> None:
        self._fleet = fleet
        self._state: LinkState | None = None
        self._numbers: dict[SharedLink, int | None] = {}
        self._names: dict[int, SharedLink] = {}
        slots = [Slot(slot) for slot in range(fleet.n_slots)]
        orders: dict[tuple[str, ...], int] = {}
        order_at = [orders.setdefault(_levels_at(fleet, slot), len(orders)) for slot in slots]
        levels = (level for order in orders for level in order)
        measured = (domain for domain, _, _ in table.pairs)
        self.domains = tuple(dict.fromkeys((*levels, *measured, *fleet.places.domains)))
        self._at = at = {domain: number for number, domain in enumerate(self.domains)}
        self.links = (table.otherwise, *table.by_level.values(), *table.pairs.values())
        of_level = {level: number for number, level in enumerate(table.by_level, start=1)}
        pairs = []
        for number, (domain, one, other) in enumerate(table.pairs, start=1 + len(of_level)):
            value_a, value_b = fleet.places.value_id(domain, one), fleet.places.value_id(domain, other)
            if value_a is not None and value_b is not None:
                pairs.append((at[domain], value_a, value_b, number))
        columns = fleet.columns
        self.map = LinkMap(
            [np.ascontiguousarray(fleet.places.ids(domain)) for domain in self.domains],
            order_at,
            [[(at[level], of_level.get(level)) for level in order] for order in orders] or [[]],
            pairs,
            np.flatnonzero(columns.present & columns.decode_or_both).tolist(),
            [(link.latency_s, link.bandwidth_bytes_per_s, _price_per_byte(link)) for link in self.links],
        )

    def transfer(self, src: Slot, dst: Slot, kv_bytes: float) -> tuple[float, float]:
        """Return the seconds of a transfer, with the other transfers on its link, and its price."""
        at, others_bytes, n_others, slowness, extra_s = self.map.state(src, dst)
        link = self.links[at]
        carried_s = (kv_bytes + min(others_bytes, n_others * kv_bytes)) / link.bandwidth_bytes_per_s
        return link.latency_s + extra_s + carried_s * slowness, link.cost(kv_bytes) or 0.0

    def link(self, src: Slot, dst: Slot) -> Link:
        """Return the link from one slot to another."""
        return self.links[self.map.link(src, dst)[0]]

    def shared(self, src: Slot, dst: Slot) -> SharedLink | None:
        """Return the shared link from one slot to another; None when it is unknown."""
        number = self.map.link(src, dst)[1]
        known = self._names.get(number)
        if known is not None:
            return known
        found = self.map.name(number)
        if found is None:
            return None
        source, _ = found
        value_at = self._fleet.places.value_at
        levels = [self.domains[domain] for domain, _ in source]
        name = SharedLink(tuple((level, value_at(level, src)) for level in levels), value_at(levels[-1], dst))
        if len(self._numbers) >= NAMES_MAX:
            self._numbers.clear()
            self._names.clear()
        self._numbers[name], self._names[number] = number, name
        return name

    def prices(self, src: Slot) -> FloatColumn:
        """Return the price of a byte from ``src`` to each decode slot; 0 elsewhere."""
        prices: FloatColumn = np.empty(self._fleet.n_slots)
        self.map.prices(prices, src)
        return prices

    def use(self, state: LinkState | None) -> None:
        """Read loads and paces from ``state`` from now on; None: no loads, and links as in the table."""
        if state is self._state and (state is None or state.reader is self):
            return
        if self._state is not None and self._state.reader is self:
            self._state.reader = None
        self._state = state
        self.map.clear()
        if state is not None:
            state.reader = self
            for link, load in state.loads():
                self.load_changed(link, load)
            for link_or_kind, pace in state.paces():
                self.pace_changed(link_or_kind, pace)

    def load_changed(self, link: SharedLink, load: LinkLoad) -> None:
        """Update the load of a link."""
        number = self._number(link)
        if number is not None:
            self.map.set_load(number, load.bytes, load.transfers)

    def pace_changed(self, link_or_kind: SharedLink | LinkKind, pace: LinkPace | None) -> None:
        """Update the pace of a link or of a kind of links."""
        if isinstance(link_or_kind, SharedLink):
            number = self._number(link_or_kind)
            if number is not None:
                self.map.set_pace(number, pace)
        elif link_or_kind.level is None or link_or_kind.level in self._at:
            level = link_or_kind.level
            self.map.set_kind_pace(None if level is None else self._at[level], link_or_kind.within, pace)

    def _number(self, link: SharedLink) -> int | None:
        """Return the number of a link; None when no worker is at its ends."""
        try:
            return self._numbers[link]
        except KeyError:
            if len(self._numbers) >= NAMES_MAX:
                self._numbers.clear()
                self._names.clear()
            number = self._numbers[link] = self._find_number(link)
            return number

    def _find_number(self, link: SharedLink) -> int | None:
        level, _ = link.src[-1]
        far = self._id(level, link.dst)
        source = []
        for name, value in link.src:
            at, value_id = self._at.get(name), self._id(name, value)
            if at is None or value_id is None:
                return None
            source.append((at, value_id))
        return None if far is None else self.map.number(source, far)

    def _id(self, domain: str, value: str | None) -> int | None:
        return UNKNOWN_VALUE if value is None else self._fleet.places.value_id(domain, value)


def links_of(fleet: Fleet, table: LinkTable) -> FleetLinks:
    """Return ``table``'s links between slots; cached until a rank joins, leaves or moves."""
    return fleet.derived_from_places(FleetLinks, table)


def transfer_seconds(
    request: RouteRequest, view: View, table: LinkTable, overlap: IntColumn | None, prefill_slot: Slot
) -> FloatColumn:
    """Return the seconds to transfer the KV from ``prefill_slot`` to each decode slot over ``table``."""
    fleet = view.fleet
    links = links_of(fleet, table)
    links.use(None if view.cost_input is None else view.cost_input.transfers)
    transfer_s: FloatColumn = np.empty(fleet.n_slots)
    links.map.transfer_seconds(
        transfer_s,
        prefill_slot,
        None if overlap is None else np.ascontiguousarray(overlap, np.uint32),
        (request.isl_tokens, fleet.block_size, kv_bytes_per_token(fleet, prefill_slot)),
    )
    return transfer_s


def price_seconds(
    request: RouteRequest, view: View, overlap: IntColumn | None, prefill_slot: Slot
) -> FloatColumn | None:
    """Return the price, weighed in seconds, of the transfer from ``prefill_slot`` to each decode slot; None
    when prices have no weight.
    """
    settings, fleet = view.settings, view.fleet
    if settings.links is None or settings.price_weight == 0.0:
        return None
    links = links_of(fleet, settings.links)
    tokens = np.full(fleet.n_slots, float(request.isl_tokens))
    if overlap is not None:
        tokens -= overlap * float(fleet.block_size)
        np.maximum(tokens, 0.0, out=tokens)
    weight = settings.price_weight * kv_bytes_per_token(fleet, prefill_slot)
    price_s: FloatColumn = tokens * links.prices(prefill_slot) * weight
    return price_s


def kv_bytes_per_token(fleet: Fleet, prefill_slot: Slot) -> int:
    """Return the KV bytes of a token; 0 when the worker does not publish them."""
    return max(0, int(fleet.columns.kv_bytes_per_token[prefill_slot]))


def _price_per_byte(link: Link) -> float:
    return (link.price_per_gb or 0.0) / BYTES_PER_GB


def _levels_at(fleet: Fleet, slot: Slot) -> tuple[str, ...]:
    card = fleet.card_at(slot)
    return () if card is None else tuple(level.strip() for level in card.runtime_config.topology_levels)

"""The link table: distance between two workers, and the latency, bandwidth and price of moving KV."""

from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from math import isfinite
from typing import NamedTuple, Protocol

import msgspec

from kvrouter.core.errors import ConfigError

BYTES_PER_GB = 1e9
"""A decimal gigabyte, as in cloud prices and network bandwidths."""


class Distance(NamedTuple):
    """The narrowest topology level that two workers share, and its depth: 1 for the broadest, 0 if none."""

    level: str | None
    depth: int


NO_SHARED_LEVEL = Distance(None, 0)


def distance(a: Mapping[str, str], b: Mapping[str, str], levels: Sequence[str]) -> Distance:
    """Return the distance of the workers whose domain values are ``a`` and ``b``.

    ``levels`` come broadest first. A level that either worker has no value for is passed over; a level in
    which they differ ends the walk, because ``rack-1`` of one zone is not ``rack-1`` of another.
    """
    shared = NO_SHARED_LEVEL
    for depth, level in enumerate(levels, start=1):
        value_a, value_b = a.get(level), b.get(level)
        if value_a is None or value_b is None:
            continue
        if value_a != value_b:
            break
        shared = Distance(level, depth)
    return shared


class Link(msgspec.Struct, frozen=True):
    """One link: seconds until the first byte, and bytes a second from then on.

    ``price_per_gb`` is the price of 10⁹ bytes, in the currency of the fleet file; None without a price.
    """

    latency_s: float
    bandwidth_bytes_per_s: float
    price_per_gb: float | None = None

    def __post_init__(self) -> None:
        if not (isfinite(self.latency_s) and self.latency_s >= 0.0):
            raise ConfigError(f"latency_s: {self.latency_s} is not 0 or more", param="latency_s")
        if not (isfinite(self.bandwidth_bytes_per_s) and self.bandwidth_bytes_per_s > 0.0):
            raise ConfigError(
                f"bandwidth_bytes_per_s: {self.bandwidth_bytes_per_s} is not above 0",
                param="bandwidth_bytes_per_s",
            )
        price = self.price_per_gb
        if price is not None and not (isfinite(price) and price >= 0.0):
            raise ConfigError(f"price_per_gb: {price} is not 0 or more", param="price_per_gb")

    def transfer_s(self, kv_bytes: float) -> float:
        """Return the seconds to move ``kv_bytes`` over this link without other transfers."""
        return self.latency_s + kv_bytes / self.bandwidth_bytes_per_s

    def cost(self, kv_bytes: float) -> float | None:
        """Return the price of ``kv_bytes``, in ``price_per_gb``'s currency, or None."""
        return None if self.price_per_gb is None else self.price_per_gb * kv_bytes / BYTES_PER_GB


ACROSS_LINK = Link(0.002, 3.125e9)
"""The assumed link between workers without a configured one: 25 Gbit/s."""


class LinkTable(msgspec.Struct, frozen=True, eq=False):
    """The configured links, by the level that two workers share and by measured pair of domain values.

    ``by_level`` maps levels to links; ``otherwise`` is the link of workers that share none of them. ``pairs``
    maps (domain, value, other value), in either order, and takes precedence; its first match wins.
    """

    by_level: Mapping[str, Link] = {}
    otherwise: Link = ACROSS_LINK
    pairs: Mapping[tuple[str, str, str], Link] = {}
    assumes_otherwise: bool = False
    """Whether ``otherwise`` is not configured."""

    @property
    def is_assumed(self) -> bool:
        """Whether no link is configured: all workers are assumed to have the same link."""
        return self.assumes_otherwise and not (self.by_level or self.pairs)

    @property
    def has_unlike_links(self) -> bool:
        """Whether two of its links differ in latency or bandwidth."""
        links = (*self.by_level.values(), self.otherwise, *self.pairs.values())
        return len({(link.latency_s, link.bandwidth_bytes_per_s) for link in links}) > 1

    def has_same_links(self, other: "LinkTable") -> bool:
        """Whether both tables have the same links, stated or assumed, with the pairs in the same order."""
        own, theirs = list(self.pairs.items()), list(other.pairs.items())
        same_links = (self.by_level, self.otherwise, own) == (other.by_level, other.otherwise, theirs)
        return same_links and self.assumes_otherwise == other.assumes_otherwise

    def states(self, shared: "SharedLink | None") -> bool:
        """Whether the link that transfers share is configured."""
        if shared is None or not self.assumes_otherwise:
            return not self.assumes_otherwise
        (level, value), other = shared.src[-1], shared.dst
        is_pair = {(level, value, other), (level, other, value)} & self.pairs.keys()
        return bool(is_pair) or (value == other and level in self.by_level)

    def digest(self) -> str:
        """Return a digest of 16 hexadecimal digits, equal for tables with the same links."""
        content = msgspec.json.encode(
            (sorted(self.by_level.items()), self.otherwise, list(self.pairs.items())), order="sorted"
        )
        return sha256(content).hexdigest()[:16]

    def link(self, a: Mapping[str, str], b: Mapping[str, str], levels: Sequence[str]) -> Link:
        """Return the link between the workers whose domain values are ``a`` and ``b``."""
        return self.decided(a, b, levels)[0]

    def decided(
        self, a: Mapping[str, str], b: Mapping[str, str], levels: Sequence[str]
    ) -> tuple[Link, str | None]:
        """Return the link, and the level or domain that decides it: None when it is ``otherwise``."""
        for (domain, one, other), link in self.pairs.items():
            if (a.get(domain), b.get(domain)) in ((one, other), (other, one)):
                return link, domain
        shared = distance(a, b, levels).depth
        for level in reversed(levels[:shared]):
            if level in self.by_level:
                return self.by_level[level], level
        return self.otherwise, None


class LinkKind(NamedTuple):
    """A kind of links: those within one value of the deciding level, or between two of its values. ``level``
    is None for links between places whose connection is unknown.
    """

    level: str | None
    within: bool


class SharedLink(NamedTuple):
    """The identity of a shared link: the source's levels and values, from the broadest down to the deciding
    level, and the destination's value of that level. Transfers with equal identities share bandwidth.
    """

    src: tuple[tuple[str, str | None], ...]
    dst: str | None

    @property
    def kind(self) -> LinkKind:
        """The kind of this link."""
        level, value = self.src[-1]
        return LinkKind(level, value == self.dst)


UNKNOWN_KIND = LinkKind(None, False)


class LinkLoad(NamedTuple):
    """The load of one link: bytes that are booked to be transferred, and the number of transfers."""

    bytes: float
    transfers: float
    """A fraction when other routers are included: they report means."""


NO_LOAD = LinkLoad(0.0, 0)


class LinkPace(NamedTuple):
    """How a link differs from the link table: bytes take ``slowness`` times as long, and each transfer
    ``extra_s`` seconds more.
    """

    slowness: float
    extra_s: float


AS_GIVEN = LinkPace(1.0, 0.0)


class LinkReader(Protocol):
    """A listener to a :class:`LinkState` that keeps a copy in another form."""

    def load_changed(self, link: SharedLink, load: LinkLoad) -> None:
        """Called with the new load of a link."""

    def pace_changed(self, link_or_kind: SharedLink | LinkKind, pace: LinkPace | None) -> None:
        """Called with the new pace of a link, or of all links of a kind without a separate pace."""


class LinkState:
    """The current load of each shared link, and the learned paces of links.

    Idle links have no entry. ``reader`` is called with each change. Without ``counts_loads`` transfers on one
    link are assumed not to delay each other: then every link is shown as idle.
    """

    def __init__(self) -> None:
        self._loads: dict[SharedLink, LinkLoad] = {}
        """The load of this router's requests."""
        self._others: dict[SharedLink, LinkLoad] = {}
        self._paces: dict[SharedLink | LinkKind, LinkPace] = {}
        self.counts_loads = True
        self.reader: LinkReader | None = None

    def __len__(self) -> int:
        """The number of links with a load."""
        return len(self._loads.keys() | self._others.keys())

    @property
    def n_entries(self) -> int:
        """The number of loads and paces."""
        return len(self._loads) + len(self._others) + len(self._paces)

    def copy(self) -> "LinkState | None":
        """Return a copy without a reader; None when every link is idle and as in the table."""
        if not (self._loads or self._others or self._paces):
            return None
        copied = LinkState()
        copied._loads, copied._others = self._loads.copy(), self._others.copy()
        copied._paces = self._paces.copy()
        copied.counts_loads = self.counts_loads
        return copied

    def count_loads(self, counts_loads: bool) -> None:
        """Set whether transfers on one link delay each other."""
        if counts_loads == self.counts_loads:
            return
        self.counts_loads = counts_loads
        if self.reader is not None:
            for link, load in self.loads():
                self.reader.load_changed(link, load)

    def loads(self) -> Iterator[tuple[SharedLink, LinkLoad]]:
        """Yield each link that has a load, with its total load."""
        return ((link, self.on(link)) for link in self._loads.keys() | self._others.keys())

    def paces(self) -> Iterator[tuple[SharedLink | LinkKind, LinkPace]]:
        """Yield each link, and each kind, with a pace that differs from the table."""
        return iter(self._paces.items())

    def own_loads(self) -> Iterator[tuple[SharedLink, LinkLoad]]:
        """Yield each link that this router's requests load, with that load."""
        return iter(self._loads.items())

    def on(self, link: SharedLink) -> LinkLoad:
        """Return the load of ``link``, of all routers."""
        if not self.counts_loads:
            return NO_LOAD
        own, others = self._loads.get(link, NO_LOAD), self._others.get(link)
        return own if others is None else LinkLoad(own.bytes + others.bytes, own.transfers + others.transfers)

    def pace_of_kind(self, kind: LinkKind) -> LinkPace:
        """Return the pace of a kind, which holds for its links without a separate pace."""
        return self._paces.get(kind, AS_GIVEN)

    def add(self, link: SharedLink, kv_bytes: float) -> None:
        """Count one more transfer, of ``kv_bytes``."""
        load = self._loads.get(link, NO_LOAD)
        self._set(link, LinkLoad(load.bytes + kv_bytes, load.transfers + 1))

    def remove(self, link: SharedLink, kv_bytes: float) -> None:
        """Remove one transfer, of ``kv_bytes``."""
        load = self._loads.get(link, NO_LOAD)
        left = load.transfers - 1
        # an idle link has exactly no load, without rounding errors
        self._set(link, LinkLoad(load.bytes - kv_bytes, left) if left > 0 else NO_LOAD)

    def set_others(self, link: SharedLink, load: LinkLoad | None) -> None:
        """Set the load of other routers' requests on a link; None for no load."""
        if load is None:
            self._others.pop(link, None)
        else:
            self._others[link] = load
        if self.reader is not None:
            self.reader.load_changed(link, self.on(link))

    def set_pace(self, link_or_kind: SharedLink | LinkKind, pace: LinkPace | None) -> None:
        """Set the pace of a link, or of all links of a kind without a separate pace. None resets a link to
        its kind's pace, and a kind to the table.
        """
        if pace == self._paces.get(link_or_kind):
            return
        if pace is None:
            del self._paces[link_or_kind]
        else:
            self._paces[link_or_kind] = pace
        if self.reader is not None:
            self.reader.pace_changed(link_or_kind, pace)

    def _set(self, link: SharedLink, load: LinkLoad) -> None:
        if load.transfers:
            self._loads[link] = load
        else:
            self._loads.pop(link, None)
        if self.reader is not None:
            self.reader.load_changed(link, self.on(link))

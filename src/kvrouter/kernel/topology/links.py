"""Distance between two workers, and what it costs to move KV between them."""

from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from math import isfinite
from typing import NamedTuple, Protocol

import msgspec

from kvrouter.core.errors import ConfigError

BYTES_PER_GB = 1e9
"""As clouds count what they charge for, and networks what they carry."""


class Distance(NamedTuple):
    """The narrowest level that two workers share, and its depth: 1 for the broadest, 0 for none."""

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

    ``price_per_gb`` is what 10⁹ bytes over it cost, in the currency of the fleet file; None: it has no price.
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
        """Seconds to move ``kv_bytes`` over this link alone."""
        return self.latency_s + kv_bytes / self.bandwidth_bytes_per_s

    def cost(self, kv_bytes: float) -> float | None:
        """What ``kv_bytes`` over this link cost; None where it has no price."""
        return None if self.price_per_gb is None else self.price_per_gb * kv_bytes / BYTES_PER_GB


SAME_LEVEL_LINK = Link(0.0005, 12.5e9)
"""What is assumed of workers that share a level: 100 Gbit/s."""

ACROSS_LINK = Link(0.002, 3.125e9)
"""What is assumed of workers that share no level: 25 Gbit/s."""


class LinkTable(msgspec.Struct, frozen=True, eq=False):
    """Links by the level that two workers share, and by pair of domain values where one was measured.

    ``by_level`` names levels; ``otherwise`` serves workers that share none of them. ``pairs`` holds
    (domain, value, other value), in either order, and wins over both; the first that fits in ``pairs``'s own
    order is taken.
    """

    by_level: Mapping[str, Link] = {}
    otherwise: Link = ACROSS_LINK
    pairs: Mapping[tuple[str, str, str], Link] = {}

    @property
    def has_unlike_links(self) -> bool:
        """Whether two of its links differ in latency or bandwidth."""
        links = (*self.by_level.values(), self.otherwise, *self.pairs.values())
        return len({(link.latency_s, link.bandwidth_bytes_per_s) for link in links}) > 1

    def says_as(self, other: "LinkTable") -> bool:
        """Whether both have the same links, the pairs in the same order."""
        own, theirs = list(self.pairs.items()), list(other.pairs.items())
        return (self.by_level, self.otherwise, own) == (other.by_level, other.otherwise, theirs)

    def digest(self) -> str:
        """Return 16 hexadecimal digits that are the same for tables with the same links."""
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
        """Return the link, and the level that decides it: None where it is ``otherwise``."""
        for (domain, one, other), link in self.pairs.items():
            if (a.get(domain), b.get(domain)) in ((one, other), (other, one)):
                return link, domain
        shared = distance(a, b, levels).depth
        for level in reversed(levels[:shared]):
            if level in self.by_level:
                return self.by_level[level], level
        return self.otherwise, None


class LinkKind(NamedTuple):
    """Links of one kind: those within one value of the level that decides, or between two of its values.
    ``level`` is None for links between places of which nobody knows how they are connected.
    """

    level: str | None
    within: bool


class SharedLink(NamedTuple):
    """What transfers have in common that share a link: the levels of the source with its values, from the
    broadest down to the one that decides, and the destination's value of that one.
    """

    src: tuple[tuple[str, str | None], ...]
    dst: str | None

    @property
    def kind(self) -> LinkKind:
        """Which links are like this one."""
        level, value = self.src[-1]
        return LinkKind(level, value == self.dst)


UNKNOWN_KIND = LinkKind(None, False)


class LinkLoad(NamedTuple):
    """What is to travel over one link: bytes, and how many transfers these are."""

    bytes: float
    transfers: float
    """Those of other routers are a mean, and no whole number."""


NO_LOAD = LinkLoad(0.0, 0)


class LinkPace(NamedTuple):
    """How a link differs from its table: bytes take ``slowness`` times as long, and each transfer ``extra_s``
    more.
    """

    slowness: float
    extra_s: float


AS_GIVEN = LinkPace(1.0, 0.0)


class LinkReader(Protocol):
    """Who keeps the state of links in a form of its own."""

    def loaded(self, link: SharedLink, load: LinkLoad) -> None:
        """This is what is to travel over the link from now on."""

    def paced(self, of: SharedLink | LinkKind, pace: LinkPace | None) -> None:
        """This is the pace of a link, or of all of a kind that have none of their own, from now on."""


class LinkState:
    """What is to travel over each link that transfers share, and how fast links are.

    Links that carry nothing have no load here. ``reader`` is given each change.
    """

    def __init__(self) -> None:
        self._loads: dict[SharedLink, LinkLoad] = {}
        """What this router counts itself."""
        self._others: dict[SharedLink, LinkLoad] = {}
        self._paces: dict[SharedLink | LinkKind, LinkPace] = {}
        self.reader: LinkReader | None = None

    def __len__(self) -> int:
        """How many links something is to travel over."""
        return len(self._loads.keys() | self._others.keys())

    def loads(self) -> Iterator[tuple[SharedLink, LinkLoad]]:
        """Yield each link that something is to travel over."""
        return ((link, self.on(link)) for link in self._loads.keys() | self._others.keys())

    def paces(self) -> Iterator[tuple[SharedLink | LinkKind, LinkPace]]:
        """Yield each link, and each kind, that is not as its table has it."""
        return iter(self._paces.items())

    def own_loads(self) -> Iterator[tuple[SharedLink, LinkLoad]]:
        """Yield each link that this router itself counts something on."""
        return iter(self._loads.items())

    def on(self, link: SharedLink) -> LinkLoad:
        """Return what is to travel over ``link``."""
        own, others = self._loads.get(link, NO_LOAD), self._others.get(link)
        return own if others is None else LinkLoad(own.bytes + others.bytes, own.transfers + others.transfers)

    def pace_of_kind(self, kind: LinkKind) -> LinkPace:
        """Return how fast the links of a kind are that have no pace of their own."""
        return self._paces.get(kind, AS_GIVEN)

    def add(self, link: SharedLink, kv_bytes: float) -> None:
        """One more transfer, of so many bytes."""
        load = self._loads.get(link, NO_LOAD)
        self._set(link, LinkLoad(load.bytes + kv_bytes, load.transfers + 1))

    def remove(self, link: SharedLink, kv_bytes: float) -> None:
        """One of them is over."""
        load = self._loads.get(link, NO_LOAD)
        left = load.transfers - 1
        # no rest of sums where nothing travels
        self._set(link, LinkLoad(load.bytes - kv_bytes, left) if left > 0 else NO_LOAD)

    def set_others(self, link: SharedLink, load: LinkLoad | None) -> None:
        """Say what other routers' requests put on a link; None: nothing."""
        if load is None:
            self._others.pop(link, None)
        else:
            self._others[link] = load
        if self.reader is not None:
            self.reader.loaded(link, self.on(link))

    def set_pace(self, of: SharedLink | LinkKind, pace: LinkPace | None) -> None:
        """Say how fast a link is, or all of a kind that have no pace of their own. None: as the link's kind
        is, or as the table has it.
        """
        if pace == self._paces.get(of):
            return
        if pace is None:
            del self._paces[of]
        else:
            self._paces[of] = pace
        if self.reader is not None:
            self.reader.paced(of, pace)

    def _set(self, link: SharedLink, load: LinkLoad) -> None:
        if load.transfers:
            self._loads[link] = load
        else:
            self._loads.pop(link, None)
        if self.reader is not None:
            self.reader.loaded(link, self.on(link))

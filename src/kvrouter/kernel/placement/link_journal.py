"""What one router says of a model's links: the transfers that it saw, and what its requests put there."""

from collections import defaultdict, deque
from collections.abc import Iterable
from typing import NamedTuple

from kvrouter.core.sync import LINK_NEWS_MAX, LinkName, LinkSeen, LinkUse
from kvrouter.kernel.placement.link_speeds import Seen
from kvrouter.kernel.topology.links import Link, LinkLoad, SharedLink


class OnLink(NamedTuple):
    """What is on one link now: to travel, and of that on its way."""

    link: SharedLink
    load: LinkLoad
    moving: LinkLoad


class LinkJournal:
    """Collects until it is taken: the last transfers, and the mean of what is on each link."""

    def __init__(self) -> None:
        self._seen: deque[Seen] = deque(maxlen=LINK_NEWS_MAX)
        self._sums: defaultdict[SharedLink, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0, 0.0])
        self.n_looks = 0
        """Since it was taken last."""
        self._said_uses = False

    def saw(self, seen: Seen) -> None:
        """A transfer arrived."""
        self._seen.append(seen)

    def look(self, links: Iterable[OnLink]) -> None:
        """This is on links now, and nothing on others."""
        self.n_looks += 1
        for link, load, moving in links:
            sums = self._sums[link]
            for at, amount in enumerate((*load, *moving)):
                sums[at] += amount

    def take_seen(self) -> list[Seen]:
        """Return the transfers since the last time."""
        seen = list(self._seen)
        self._seen.clear()
        return seen

    def take_uses(self) -> tuple[LinkUse, ...] | None:
        """Return what was on each link in the mean of all looks since the last time, those with most bytes
        where they are too many; None where nothing was, also before.
        """
        n = max(self.n_looks, 1)
        found = [
            LinkUse(LinkName(*link), *(max(0.0, amount / n) for amount in sums))
            for link, sums in self._sums.items()
        ]
        self._sums.clear()
        self.n_looks = 0
        if not found and not self._said_uses:
            return None
        self._said_uses = bool(found)
        if len(found) > LINK_NEWS_MAX:
            found.sort(key=lambda use: -use.bytes)
        return tuple(found[:LINK_NEWS_MAX])


def as_message(seen: Seen, *, now_s: float) -> LinkSeen:
    """Return a transfer as routers say it to each other."""
    return LinkSeen(
        seen_by=seen.seen_by,
        number=seen.number,
        link=None if seen.link is None else LinkName(*seen.link),
        latency_s=seen.table.latency_s,
        bandwidth_bytes_per_s=seen.table.bandwidth_bytes_per_s,
        age_s=max(0.0, now_s - seen.at_s),
        plain_s=seen.plain_s,
        seen_s=seen.seen_s,
    )


def as_seen(message: LinkSeen, *, now_s: float) -> Seen:
    """Return a transfer that another router saw."""
    at_s = now_s - message.age_s
    return Seen(
        link=None if message.link is None else SharedLink(*message.link),
        table=Link(message.latency_s, message.bandwidth_bytes_per_s),
        began_s=at_s - message.seen_s,
        at_s=at_s,
        plain_s=message.plain_s,
        seen_s=message.seen_s,
        seen_by=message.seen_by,
        number=message.number,
    )

"""The journal of one router's link measurements and loads, for updates to other routers."""

from collections import defaultdict, deque
from collections.abc import Iterable
from typing import NamedTuple

from kvrouter.core.replica_messages import LINK_UPDATE_MAX, LinkName, LinkSample, LinkUse
from kvrouter.kernel.placement.link_speeds import TransferSample
from kvrouter.kernel.topology.link_table import Link, LinkLoad, SharedLink


class LinkTraffic(NamedTuple):
    """The load of one link: all booked transfers, and those that are in progress (``moving``)."""

    link: SharedLink
    load: LinkLoad
    moving: LinkLoad


class LinkJournal:
    """Collects the last measured transfers and the mean load of each link, until they are taken."""

    def __init__(self) -> None:
        self._samples: deque[TransferSample] = deque(maxlen=LINK_UPDATE_MAX)
        self._sums: defaultdict[SharedLink, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0, 0.0])
        self.n_samples = 0
        """The number of samples of loads since they were last taken."""
        self._had_uses = False

    def record(self, sample: TransferSample) -> None:
        """Record a measured transfer."""
        self._samples.append(sample)

    def sample_loads(self, links: Iterable[LinkTraffic]) -> None:
        """Sample the current load of links; a link that is missing has none."""
        self.n_samples += 1
        for link, load, moving in links:
            sums = self._sums[link]
            for at, amount in enumerate((*load, *moving)):
                sums[at] += amount

    def take_samples(self) -> list[TransferSample]:
        """Return the transfers since the last call."""
        samples = list(self._samples)
        self._samples.clear()
        return samples

    def take_uses(self) -> tuple[LinkUse, ...] | None:
        """Return the mean load of each link over the samples since the last call, at most
        :data:`LINK_UPDATE_MAX` by bytes; None when there is no load, as in the last call.
        """
        n = max(self.n_samples, 1)
        found = [
            LinkUse(LinkName(*link), *(max(0.0, amount / n) for amount in sums))
            for link, sums in self._sums.items()
        ]
        self._sums.clear()
        self.n_samples = 0
        if not found and not self._had_uses:
            return None
        self._had_uses = bool(found)
        if len(found) > LINK_UPDATE_MAX:
            found.sort(key=lambda use: -use.bytes)
        return tuple(found[:LINK_UPDATE_MAX])


def as_message(sample: TransferSample, *, now_s: float) -> LinkSample:
    """Return a measured transfer as a message to other routers."""
    return LinkSample(
        seen_by=sample.seen_by,
        number=sample.number,
        link=None if sample.link is None else LinkName(*sample.link),
        latency_s=sample.table.latency_s,
        bandwidth_bytes_per_s=sample.table.bandwidth_bytes_per_s,
        age_s=max(0.0, now_s - sample.at_s),
        plain_s=sample.plain_s,
        seen_s=sample.seen_s,
    )


def as_sample(message: LinkSample, *, now_s: float) -> TransferSample:
    """Return the measured transfer of another router's message."""
    at_s = now_s - message.age_s
    return TransferSample(
        link=None if message.link is None else SharedLink(*message.link),
        table=Link(message.latency_s, message.bandwidth_bytes_per_s),
        began_s=at_s - message.seen_s,
        at_s=at_s,
        plain_s=message.plain_s,
        seen_s=message.seen_s,
        seen_by=message.seen_by,
        number=message.number,
    )

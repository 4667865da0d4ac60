"""The links that KV crosses, and how concurrent transfers share them.

A transfer waits for its link's latency and then moves its bytes. All transfers that move over one link at
once get equal shares of its bandwidth. A link belongs to a pair of domain values and a direction, so a to b
and b to a do not slow each other down.
"""

from collections.abc import Mapping
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

import msgspec

from kvrouter.topology.links import ACROSS_LINK, SAME_LEVEL_LINK, Link


class Links(msgspec.Struct, frozen=True, kw_only=True):
    """Links between values of one topology level. ``pairs`` holds two values in either order, and wins."""

    same: Link = SAME_LEVEL_LINK
    cross: Link = ACROSS_LINK
    pairs: Mapping[tuple[str, str], Link] = {}

    def between(self, src_domain: str, dst_domain: str) -> Link:
        """Return the link from one domain value to another."""
        link = self.pairs.get((src_domain, dst_domain)) or self.pairs.get((dst_domain, src_domain))
        return link or (self.same if src_domain == dst_domain else self.cross)


class Arrived(NamedTuple):
    """A transfer whose last byte arrived, and how long it took: the link's latency, and the way."""

    at_s: float
    key: str
    kv_bytes: int
    seconds: float


class DomainPair(NamedTuple):
    """From where to where."""

    src_domain: str
    dst_domain: str


class Carried(msgspec.Struct):
    """What went from one domain to another: transfers begun, and bytes that arrived."""

    transfers: int = 0
    arrived_bytes: int = 0


class _Transfer:
    __slots__ = ("begun_s", "key", "kv_bytes", "lane", "moving")

    def __init__(self, key: str, lane: "_Lane", kv_bytes: int, begun_s: float) -> None:
        self.key = key
        self.lane = lane
        self.kv_bytes = kv_bytes
        self.begun_s = begun_s
        self.moving = False


class _Lane:
    """One link in one direction. ``served_bytes`` is the share of a transfer that was there all the time."""

    def __init__(self, pair: DomainPair, link: Link) -> None:
        self.pair = pair
        self.link = link
        self.n_moving = 0
        self.served_bytes = 0.0
        self.served_at_s = 0.0
        self.targets: list[tuple[float, int, _Transfer]] = []
        self.carried = Carried()

    def serve_until(self, now: float) -> None:
        """Account for the shares handed out since the last change."""
        if self.n_moving:
            share_bytes = (now - self.served_at_s) * self.link.bandwidth_bytes_per_s / self.n_moving
            self.served_bytes += max(0.0, share_bytes)
        else:
            self.served_bytes = 0.0
        self.served_at_s = now

    def next_time(self) -> float | None:
        """When the first of the moving transfers will have got all its bytes."""
        while self.targets and not self.targets[0][2].moving:
            heappop(self.targets)
        if not self.targets:
            return None
        left_bytes = max(0.0, self.targets[0][0] - self.served_bytes)
        return self.served_at_s + left_bytes * self.n_moving / self.link.bandwidth_bytes_per_s


class Network:
    """Transfers in flight over all links. Times are seconds on the caller's clock, never going back."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._lanes: dict[DomainPair, _Lane] = {}
        self._transfers: dict[str, _Transfer] = {}
        self._latencies: list[tuple[float, int, _Transfer]] = []
        self._order = count()

    def start(self, now: float, key: str, src_domain: str, dst_domain: str, kv_bytes: int) -> None:
        """Begin a transfer. ValueError when ``key`` is in flight already."""
        if key in self._transfers:
            raise ValueError(f"transfer {key} is in flight already")
        pair = DomainPair(src_domain, dst_domain)
        lane = self._lanes.get(pair)
        if lane is None:
            lane = self._lanes[pair] = _Lane(pair, self._links.between(src_domain, dst_domain))
        lane.carried.transfers += 1
        transfer = self._transfers[key] = _Transfer(key, lane, kv_bytes, now)
        heappush(self._latencies, (now + lane.link.latency_s, next(self._order), transfer))

    def cancel(self, now: float, key: str) -> bool:
        """End a transfer early; its share goes to the others. False when it is not in flight."""
        transfer = self._transfers.pop(key, None)
        if transfer is None:
            return False
        if transfer.moving:
            transfer.lane.serve_until(now)
            transfer.lane.n_moving -= 1
            transfer.moving = False
        return True

    def next_time(self) -> float | None:
        """When :meth:`advance` has something to do, or None when nothing is in flight."""
        times = [time for lane in self._lanes.values() if (time := lane.next_time()) is not None]
        while self._latencies and self._transfers.get(self._latencies[0][2].key) is not self._latencies[0][2]:
            heappop(self._latencies)
        if self._latencies:
            times.append(self._latencies[0][0])
        return min(times, default=None)

    def advance(self, now: float) -> list[Arrived]:
        """Move bytes until ``now``; return the transfers that ended, in the order of their ends."""
        arrived: list[Arrived] = []
        while (time := self.next_time()) is not None and time <= now:
            self._begin_moving(time)
            for lane in self._lanes.values():
                ends_at = lane.next_time()
                if ends_at is not None and ends_at <= time:
                    arrived.extend(self._finish_first(lane, time))
        return arrived

    def carried(self) -> dict[DomainPair, Carried]:
        """What each link has carried so far."""
        return {pair: lane.carried for pair, lane in self._lanes.items()}

    def __len__(self) -> int:
        return len(self._transfers)

    def _begin_moving(self, now: float) -> None:
        while self._latencies and self._latencies[0][0] <= now:
            _, order, transfer = heappop(self._latencies)
            if self._transfers.get(transfer.key) is not transfer:
                continue
            lane = transfer.lane
            lane.serve_until(now)
            lane.n_moving += 1
            transfer.moving = True
            heappush(lane.targets, (lane.served_bytes + transfer.kv_bytes, order, transfer))

    def _finish_first(self, lane: _Lane, now: float) -> list[Arrived]:
        """End every transfer whose target is reached at ``now``: served bytes are set to it, not rounded."""
        target = lane.targets[0][0]
        lane.served_bytes, lane.served_at_s = target, now
        arrived: list[Arrived] = []
        while lane.targets and lane.targets[0][0] <= target:
            _, _, transfer = heappop(lane.targets)
            if transfer.moving:
                transfer.moving = False
                lane.n_moving -= 1
                lane.carried.arrived_bytes += transfer.kv_bytes
                del self._transfers[transfer.key]
                arrived.append(Arrived(now, transfer.key, transfer.kv_bytes, now - transfer.begun_s))
        return arrived

"""Transfers in flight over the links between mock workers.

A transfer waits for its link's latency and then moves its bytes. All transfers that move over one link at
once get equal shares of its bandwidth. A link has one direction, so a to b and b to a do not slow each other
down; :class:`~kvrouter.engines.mock_engine.mock_links.Links` determines which transfers share one.
"""

from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

import msgspec

from kvrouter.engines.mock_engine.mock_links import DomainPair, LinkChange, LinkName, Links, Place
from kvrouter.kernel.topology.link_table import Link


class Arrived(NamedTuple):
    """A transfer that has arrived, and how long it took: the link's latency and the transmission."""

    at_s: float
    key: str
    kv_bytes: int
    seconds: float


class Carried(msgspec.Struct):
    """The traffic from one domain to another: transfers begun, and bytes that arrived."""

    transfers: int = 0
    arrived_bytes: int = 0


class _Transfer:
    __slots__ = ("begun_s", "carried", "key", "kv_bytes", "moving", "state")

    def __init__(
        self, key: str, state: "_LinkState", carried: Carried, *, kv_bytes: int, begun_s: float
    ) -> None:
        self.key = key
        self.state = state
        self.carried = carried
        self.kv_bytes = kv_bytes
        self.begun_s = begun_s
        self.moving = False


class _LinkState:
    """One link in one direction. ``served_bytes`` is the share of a transfer that was there all the time."""

    def __init__(self, name: LinkName, first: Link) -> None:
        self.name = name
        self.first = first
        self.link = first
        self.n_open = 0
        self.n_moving = 0
        self.served_bytes = 0.0
        self.served_at_s = 0.0
        self.targets: list[tuple[float, int, _Transfer]] = []

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
        self._changes: list[LinkChange] = []
        self._link_states: dict[LinkName, _LinkState] = {}
        """The states of links with transfers in flight."""
        self._carried: dict[DomainPair, Carried] = {}
        self._transfers: dict[str, _Transfer] = {}
        self._latencies: list[tuple[float, int, _Transfer]] = []
        self._order = count()
        self._next_s: float | None = None
        self._is_next_known = True

    def start(self, now: float, key: str, src: Place, dst: Place, kv_bytes: int) -> None:
        """Begin a transfer. ValueError when ``key`` is in flight already."""
        if key in self._transfers:
            raise ValueError(f"transfer {key} is in flight already")
        self._is_next_known = False
        name, first = self._links.shared(src, dst)
        state = self._link_states.get(name)
        if state is None:
            state = self._link_states[name] = _LinkState(name, first)
            for change in self._changes:
                if change.concerns(name):
                    state.link = change.changed(first, state.link)
        state.n_open += 1
        carried = self._carried.setdefault(self._links.pair(src, dst), Carried())
        carried.transfers += 1
        transfer = _Transfer(key, state, carried, kv_bytes=kv_bytes, begun_s=now)
        self._transfers[key] = transfer
        heappush(self._latencies, (now + state.link.latency_s, next(self._order), transfer))

    def change(self, now: float, change: LinkChange) -> None:
        """Change a link: transfers in flight go on at its new bandwidth, and later ones have its new latency.
        A change to the same values has no effect, bit for bit.
        """
        self._changes.append(change)
        for name, state in self._link_states.items():
            link = change.changed(state.first, state.link) if change.concerns(name) else state.link
            if link != state.link:
                state.serve_until(now)
                state.link = link
                self._is_next_known = False

    def cancel(self, now: float, key: str) -> bool:
        """End a transfer early; its share goes to the others. False when it is not in flight."""
        transfer = self._transfers.pop(key, None)
        if transfer is None:
            return False
        self._is_next_known = False
        if transfer.moving:
            transfer.state.serve_until(now)
            transfer.state.n_moving -= 1
            transfer.moving = False
        self._close(transfer.state)
        return True

    def next_time(self) -> float | None:
        """Return when :meth:`advance` has something to do; None without transfers in flight."""
        if not self._is_next_known:
            self._next_s = self._find_next()
            self._is_next_known = True
        return self._next_s

    def _find_next(self) -> float | None:
        times = [time for state in self._link_states.values() if (time := state.next_time()) is not None]
        while self._latencies and self._transfers.get(self._latencies[0][2].key) is not self._latencies[0][2]:
            heappop(self._latencies)
        if self._latencies:
            times.append(self._latencies[0][0])
        return min(times, default=None)

    def advance(self, now: float) -> list[Arrived]:
        """Move bytes until ``now``; return the transfers that ended, in the order of their ends."""
        arrived: list[Arrived] = []
        while (time := self.next_time()) is not None and time <= now:
            self._is_next_known = False
            self._begin_moving(time)
            for state in tuple(self._link_states.values()):
                ends_at = state.next_time()
                if ends_at is not None and ends_at <= time:
                    arrived.extend(self._finish_first(state, time))
        return arrived

    def carried(self) -> dict[DomainPair, Carried]:
        """Return the traffic between each pair of domains so far."""
        return dict(self._carried)

    def __len__(self) -> int:
        return len(self._transfers)

    def _begin_moving(self, now: float) -> None:
        while self._latencies and self._latencies[0][0] <= now:
            _, order, transfer = heappop(self._latencies)
            if self._transfers.get(transfer.key) is not transfer:
                continue
            state = transfer.state
            state.serve_until(now)
            state.n_moving += 1
            transfer.moving = True
            heappush(state.targets, (state.served_bytes + transfer.kv_bytes, order, transfer))

    def _finish_first(self, state: _LinkState, now: float) -> list[Arrived]:
        """End every transfer that reaches its target at ``now``: served bytes are set to it, not rounded."""
        target = state.targets[0][0]
        state.served_bytes, state.served_at_s = target, now
        arrived: list[Arrived] = []
        while state.targets and state.targets[0][0] <= target:
            _, _, transfer = heappop(state.targets)
            if transfer.moving:
                transfer.moving = False
                state.n_moving -= 1
                transfer.carried.arrived_bytes += transfer.kv_bytes
                del self._transfers[transfer.key]
                self._close(state)
                arrived.append(Arrived(now, transfer.key, transfer.kv_bytes, now - transfer.begun_s))
        return arrived

    def _close(self, state: _LinkState) -> None:
        """One transfer less is in flight over a link."""
        state.n_open -= 1
        if not state.n_open:
            del self._link_states[state.name]

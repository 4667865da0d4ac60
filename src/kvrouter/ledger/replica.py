"""Another router, as its messages tell of it: which of its deltas were applied, and which are missing."""

from collections.abc import Iterable
from typing import Final, Protocol

from kvrouter.core.sync import AddRequest, Delta, Deltas, Heartbeat, StatePart

BACKLOG_MAX: Final = 256
"""How many messages are kept that follow a missing one. When there are more they are let go: the state that
was asked for has them."""


class ReplicaLeases(Protocol):
    """The leases of one other router, as they are booked here."""

    def __len__(self) -> int:
        """How many there are."""

    def apply(self, delta: Delta) -> None:
        """One of them changed."""

    def replace(self, leases: Iterable[AddRequest]) -> None:
        """These are all of them."""


class Replica:
    """Puts one router's messages in order. What was missed is asked for as a whole; see :meth:`wants_state`.

    A router that was never heard of held nothing before its first deltas, which have the number 1. While it
    is behind, nothing is applied: deltas that follow a gap wait for it to be closed, or for the state.
    """

    def __init__(self, leases: ReplicaLeases, *, now_s: float, leases_max: int) -> None:
        self.leases = leases
        self.heard_s = now_s
        self.duplicates = 0
        self.gaps = 0
        self._leases_max = leases_max
        self._next = 1
        self._latest = 0
        """The highest number that is known to exist."""

        self._is_doubted = False
        self._backlog: dict[int, tuple[Delta, ...]] = {}
        self._asked_s: float | None = None
        self._parts: dict[int, tuple[AddRequest, ...]] = {}
        self._parts_number = -1

    @property
    def is_behind(self) -> bool:
        """Whether something of this router's leases is not known here."""
        return self._next <= self._latest or self._is_doubted

    def wants_state(self, now_s: float, *, again_after_s: float) -> bool:
        """Whether to ask now; asking is taken for done."""
        if not self.is_behind:
            self._asked_s = None
            return False
        if self._asked_s is not None and now_s < self._asked_s + again_after_s:
            return False
        if self._asked_s is None:
            self.gaps += 1
        self._asked_s = now_s
        return True

    def on_deltas(self, message: Deltas) -> None:
        """Deltas came, in whatever order."""
        number = message.number
        if number < self._next or number in self._backlog:
            self.duplicates += 1
            return
        self._latest = max(self._latest, number)
        self._backlog[number] = message.deltas
        self._drain()
        if len(self._backlog) > BACKLOG_MAX:
            self._backlog.clear()

    def on_heartbeat(self, message: Heartbeat) -> None:
        """It lives, and says how far it is."""
        self._latest = max(self._latest, message.number)
        if message.number == self._next - 1 and min(message.open_leases, self._leases_max) != len(
            self.leases
        ):
            self._is_doubted = True

    def on_state_part(self, message: StatePart) -> None:
        """A part of its leases came, asked for or not."""
        number = message.number
        if not self.is_behind or number < self._next - 1 or number < self._parts_number:
            return
        if number > self._parts_number:
            self._parts.clear()
            self._parts_number = number
        self._parts[message.part] = message.leases
        n_leases = sum(map(len, self._parts.values()))
        if n_leases > self._leases_max:
            self._parts.clear()
        if len(self._parts) < message.n_parts:
            return
        self.leases.replace(lease for part in self._parts.values() for lease in part)
        self._parts.clear()
        self._parts_number = -1
        self._is_doubted = False
        self._next = number + 1
        self._latest = max(self._latest, number)
        self._backlog = {later: deltas for later, deltas in self._backlog.items() if later > number}
        self._asked_s = None
        self._drain()

    def _drain(self) -> None:
        while self._next in self._backlog:
            for delta in self._backlog.pop(self._next):
                self.leases.apply(delta)
            self._next += 1

"""What share of the decode steps of others a prompt waits for, learned from first tokens.

An engine that computes prompts and decode steps one after another lets a prompt wait for all of them; one
that computes both at once, or on other hardware, for a part or none. With the seconds that a rank of
slowness 1 takes for what is queued and the prompt (plain), and for the decode steps meanwhile (steps)::

    seen / plain = slowness of the rank + interference · steps / plain

It is the least squares of that line, each rank with a slowness of its own, over the last requests of all
ranks, drawn towards 1 as if noise of 20 % had been seen where 1 is true within 0.5. A rank that always
decodes says nothing of it; without it such a rank would count as faster than one that is idle half of the
time, wherever prompts do not wait for decode steps.
"""

from kvrouter.core.ids import Slot

MEMORY = 64
"""About how many of each rank's last requests count."""

CAUTION = 0.2**2 / 0.5**2
"""What weighs 1, in squares of steps / plain."""

RATIO_MAX = 10.0
"""One request counts as at most so many times as long as the plain seconds."""


class _Moments:
    """Weighted means of one rank's requests, and what they spread, with older ones counting less."""

    __slots__ = ("products", "seen", "squares", "steps", "weight")

    def __init__(self) -> None:
        self.weight = self.steps = self.seen = self.squares = self.products = 0.0

    def note(self, steps: float, seen: float) -> None:
        keep = 1.0 - 1.0 / MEMORY
        self.weight = keep * self.weight + 1.0
        off = steps - self.steps
        self.steps += off / self.weight
        self.seen += (seen - self.seen) / self.weight
        self.squares = keep * self.squares + off * (steps - self.steps)
        self.products = keep * self.products + off * (seen - self.seen)


class Interference:
    """The interference of one model's ranks."""

    def __init__(self) -> None:
        self.share = 1.0
        """0 to 1; as of the last :meth:`refresh`."""
        self._ranks: dict[Slot, _Moments] = {}

    def note(self, slot: Slot, *, plain_s: float, steps_s: float, seen_s: float) -> None:
        """A first token came after ``seen_s``; ``plain_s`` is above 0."""
        moments = self._ranks.get(slot)
        if moments is None:
            moments = self._ranks[slot] = _Moments()
        moments.note(steps_s / plain_s, min(seen_s / plain_s, RATIO_MAX))

    def refresh(self) -> None:
        """Take what was noted since the last time into account."""
        squares = sum(moments.squares for moments in self._ranks.values())
        products = sum(moments.products for moments in self._ranks.values())
        self.share = min(max((CAUTION + products) / (CAUTION + squares), 0.0), 1.0)

    def freed(self, slot: Slot) -> None:
        """The slot's rank is gone."""
        self._ranks.pop(slot, None)

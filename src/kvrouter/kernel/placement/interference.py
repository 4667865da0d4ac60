"""Interference: the share of other requests' decode steps that a prompt waits for, learned from first tokens.

On an engine that computes prompts and decode steps in turn, a prompt waits for all decode steps; on one that
computes both at once, or on separate hardware, for some or none. ``plain`` is the seconds that a rank of
slowness 1 takes for its queue and the prompt, ``steps`` those of the decode steps in that time::

    observed / plain = slowness of the rank + interference · steps / plain

It is the least-squares fit of that line, with a separate slowness for each rank, over the last requests of
all ranks, with a prior of 1 ± 0.5 at a noise of 20 %. A rank that always decodes does not determine it;
without it such a rank would appear faster than one that is idle half of the time, on engines where prompts do
not wait for decode steps.
"""

from kvrouter.core.ids import Slot
from kvrouter.kernel.placement.kept_speeds import KeptMoments

RECENT_REQUESTS = 64
"""The approximate number of each rank's last requests that count."""

PRIOR_SQUARES = 0.2**2 / 0.5**2
"""The weight of the prior value 1, in squares of steps / plain."""

RATIO_MAX = 10.0
"""The largest ratio of a request's seconds to its plain seconds that counts."""


class _Moments:
    """Weighted means and covariances of one rank's requests; older requests have less weight."""

    __slots__ = ("observed", "products", "squares", "steps", "weight")

    def __init__(self) -> None:
        self.weight = self.steps = self.observed = self.squares = self.products = 0.0

    def note(self, steps: float, observed: float) -> None:
        keep = 1.0 - 1.0 / RECENT_REQUESTS
        self.weight = keep * self.weight + 1.0
        off = steps - self.steps
        self.steps += off / self.weight
        self.observed += (observed - self.observed) / self.weight
        self.squares = keep * self.squares + off * (steps - self.steps)
        self.products = keep * self.products + off * (observed - self.observed)


class Interference:
    """The interference of one model's ranks."""

    def __init__(self) -> None:
        self.share = 1.0
        """0 to 1; as of the last :meth:`refresh`."""
        self._ranks: dict[Slot, _Moments] = {}

    def note(self, slot: Slot, *, plain_s: float, steps_s: float, seen_s: float) -> None:
        """Add a first token after ``seen_s``; ``plain_s`` must be above 0."""
        moments = self._ranks.get(slot)
        if moments is None:
            moments = self._ranks[slot] = _Moments()
        moments.note(steps_s / plain_s, min(seen_s / plain_s, RATIO_MAX))

    def refresh(self) -> None:
        """Update ``share`` from the requests so far."""
        squares = sum(moments.squares for moments in self._ranks.values())
        products = sum(moments.products for moments in self._ranks.values())
        self.share = min(max((PRIOR_SQUARES + products) / (PRIOR_SQUARES + squares), 0.0), 1.0)

    def kept(self, slot: Slot) -> KeptMoments | None:
        """Return what the slot's requests show, to be kept over a restart; None without any."""
        found = self._ranks.get(slot)
        if found is None:
            return None
        return KeptMoments(found.weight, found.steps, found.observed, found.squares, found.products)

    def recall(self, slot: Slot, kept: KeptMoments) -> None:
        """Set what was kept of the slot's requests."""
        moments = self._ranks[slot] = _Moments()
        moments.weight, moments.steps, moments.observed = kept.weight, kept.steps, kept.observed
        moments.squares, moments.products = kept.squares, kept.products

    def freed(self, slot: Slot) -> None:
        """Remove the slot's rank."""
        self._ranks.pop(slot, None)

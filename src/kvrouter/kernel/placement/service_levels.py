"""Service levels: a request is refused at once if its first token is predicted to come too late to be of use.

Requests with a strict priority are critical, and refused last. Those that come later take a share of the
fleet's work, and should not wait for others. So any other request is judged by its wait under a strict order,
which is 1 / (1 - that share) times as long (Cobham 1954, queues with priorities).
"""

from math import ceil

from msgspec import structs

from kvrouter.core.errors import Reason, SloUnreachable
from kvrouter.core.requests import Leg, ServiceLevel
from kvrouter.kernel.routing.interface import Decision

HALF_LIFE_S = 30.0
"""The half-life of work in the share of critical requests."""

SHARE_MAX = 0.5
"""The largest share of work that other requests leave to critical ones."""


class CriticalWork:
    """The share of critical requests in the work of prompts that were placed. ``now_s`` is seconds of one
    monotonic clock.
    """

    __slots__ = ("_at_s", "_critical_s", "_work_s")

    def __init__(self) -> None:
        self._critical_s = self._work_s = self._at_s = 0.0

    @property
    def share(self) -> float:
        """The share, at most :data:`SHARE_MAX`."""
        return min(SHARE_MAX, self._critical_s / self._work_s) if self._work_s else 0.0

    def add(self, work_s: float, *, is_critical: bool, now_s: float) -> None:
        """Add the seconds of one placed prompt."""
        kept = 2.0 ** ((self._at_s - now_s) / HALF_LIFE_S)
        self._at_s = now_s
        self._work_s = self._work_s * kept + work_s
        self._critical_s = self._critical_s * kept + (work_s if is_critical else 0.0)


def refuse_late(decision: Decision, level: ServiceLevel, share: float, limit_s: float) -> None:
    """Raise :class:`SloUnreachable` if the first token is predicted more than ``limit_s`` seconds from now;
    never where no time is predicted. ``share`` is that of critical work. While a prompt is prefilled, memory
    comes free at the decode worker; the times of pairs that were picked together have that already.
    """
    first, decode = decision.prefilling, decision.decode
    if first.times is None:
        return
    expected_s = first.times.expected_s
    if first is not decode and decode.times is not None:
        meanwhile_s = 0.0 if decision.together else first.times.queue_s + first.times.prefill_s
        expected_s += decode.times.expected_s - min(decode.times.memory_s, meanwhile_s)
    wait_s = first.times.queue_s + first.times.memory_s
    reserved_s = 0.0 if level.is_critical else wait_s * share / (1.0 - share)
    late_s = expected_s + reserved_s - limit_s
    if late_s <= 0.0:
        return
    reserve = f", with {reserved_s:.3g} s left to critical requests" if reserved_s else ""
    refused = SloUnreachable(
        f"the first token is predicted in {expected_s:.3g} s{reserve}; it is of use within {limit_s:.3g} s",
        refusals={Reason.TOO_LATE: 1},
        role=(Leg.PREFILL if first.leg is Leg.PREFILL else Leg.DECODE).value,
        retry_after_s=ceil(late_s),
    )
    refused.rows = tuple(
        structs.replace(row, picked=False, refused=Reason.TOO_LATE) if row.picked else row
        for row in decision.rows
    )
    raise refused

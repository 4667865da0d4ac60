"""Service levels: a request is refused at once if its first token is predicted to come too late to be of use.

Requests with a strict priority are critical, and refused last. Those that come later take a share of the
fleet's work, and should not wait for others. So any other request is judged by its wait under a strict order,
which is 1 / (1 - that share) times as long (Cobham 1954, queues with priorities).
"""

from collections.abc import Sequence
from math import ceil

from msgspec import structs

from kvrouter.core.constraints import RouterConfigOverride, RouterMode
from kvrouter.core.errors import Reason, RoutingRefused, SloUnreachable
from kvrouter.core.requests import Leg, ServiceLevel
from kvrouter.kernel.routing.interface import Candidate, Decision, RouteRequest, View

HALF_LIFE_S = 30.0
"""The half-life of work in the share of critical requests."""

SHARE_MAX = 0.5
"""The largest share of work that other requests leave to critical ones."""

_CHEAPEST = RouterConfigOverride(overlap_score_weight=1.0, router_temperature=0.0, router_mode=RouterMode.KV)


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


def soonest(request: RouteRequest, view: View) -> tuple[RouteRequest, View]:
    """Return the input of a decision for the worker with the earliest first token, whatever else it costs."""
    settings, constraints = view.settings, structs.replace(request.constraints, preferred_taints={})
    request = structs.replace(request, constraints=constraints, override=_CHEAPEST, soonest=True)
    return request, structs.replace(view, settings=structs.replace(settings, price_weight=0.0))


def refuse_late(
    decision: Decision,
    level: ServiceLevel,
    share: float,
    limit_s: float,
    *,
    waited_s: float = 0.0,
    cached_blocks: int = 0,
) -> None:
    """Raise :class:`SloUnreachable` if the first token is predicted more than ``limit_s`` seconds after the
    arrival, ``waited_s`` seconds ago; never where no time is predicted. ``share`` is that of critical work.
    While a prompt is prefilled, memory comes free at the decode worker; the times of pairs that were picked
    together have that already. A prompt that alone takes longer is in time after no wait, unless a rank with
    a queue has more of it cached: ``cached_blocks`` is the most that one has.
    """
    first, decode = decision.prefilling, decision.decode
    if first.times is None:
        return
    expected_s, prompt_s = first.times.expected_s, first.times.prefill_s
    if first is not decode and decode.times is not None:
        meanwhile_s = 0.0 if decision.together else first.times.queue_s + prompt_s
        expected_s += decode.times.expected_s - min(decode.times.memory_s, meanwhile_s)
        prompt_s += decode.times.prefill_s
    wait_s = first.times.queue_s + first.times.memory_s
    reserved_s = 0.0 if level.is_critical else wait_s * share / (1.0 - share)
    late_s = expected_s + reserved_s - limit_s
    if late_s + waited_s <= 0.0:
        return
    reserve = f", with {reserved_s:.3g} s left to critical requests" if reserved_s else ""
    is_alone = prompt_s > limit_s and cached_blocks <= first.overlap_blocks
    alone = f"; the prompt alone takes {prompt_s:.3g} s" if is_alone else ""
    refused = SloUnreachable(
        f"the first token is predicted in {expected_s:.3g} s{reserve}; it is of use within "
        f"{limit_s - waited_s:.3g} s{alone}",
        refusals={Reason.TOO_LATE: first.candidates},
        role=(Leg.PREFILL if first.leg is Leg.PREFILL else Leg.DECODE).value,
        retry_after_s=None if alone else max(1, ceil(late_s)),
    )
    refused.rows = late_rows(decision.rows)
    raise refused


def waited_too_long(refused: RoutingRefused, objective_s: float) -> SloUnreachable:
    """Return the refusal of a request whose objective passed while it waited, for what ``refused`` says."""
    return SloUnreachable(
        f"no first token within {objective_s:.3g} s: {refused.message}",
        refusals=refused.refusals,
        role=refused.role,
        domain=refused.domain,
        retry_after_s=refused.retry_after_s,
    )


def late_rows(rows: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Return the candidates of a request that is refused as late: it is late at each that could take it."""
    return tuple(structs.replace(row, picked=False, refused=row.refused or Reason.TOO_LATE) for row in rows)

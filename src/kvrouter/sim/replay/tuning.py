"""Tuned rules: each with the parameters that suit the trace, so that no rule is compared untuned.

A rule is tried with every point of its grid on the first half of a trace; the point with the fewest failures
and then the least mean TTFT is compared on the second half, with caches that the first half filled.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import islice

from kvrouter.core.workers import Role
from kvrouter.engines.mock_engine.mock_links import DomainPair
from kvrouter.engines.mock_engine.network import Carried
from kvrouter.fleetfile.fleet_checks import load_fleet
from kvrouter.settings.problems import Document
from kvrouter.sim.replay.carriage import Places
from kvrouter.sim.replay.outcomes import Outcomes
from kvrouter.sim.replay.simulation import Result
from kvrouter.sim.replay.variant import OURS, Setting, Variant, variants
from kvrouter.sim.rules.registry import RULES
from kvrouter.sim.traces.read import Trace
from kvrouter.sim.traces.trace_request import TraceRequest

_OVERLAP = tuple(f"overlap_score_weight={weight:g}" for weight in (0.5, 1.0, 2.0, 4.0, 8.0, 16.0))
_TIME = "router_cost=time"
_LINKS = tuple(f"kv_transfer_weight={weight}" for weight in (10, 30, 100, 300, 1_000, 3_000))


def ours_grid(roles: Collection[Role]) -> tuple[str, ...]:
    """Return the grid for tuning the router's own rule, in a fleet with these roles: at most as many points
    as for published rules.

    The cost of time is one point: it has no parameters. The others weigh blocks. A pure prefill or decode
    worker weighs one kind of blocks only, so that the weight between the two has no effect; the price of a
    second of KV transfer has one.
    """
    if Role.PREFILL not in roles:
        return (_TIME, *_OVERLAP)
    if Role.BOTH in roles:
        return (_TIME, *_OVERLAP[:-1], *_LINKS)
    return (_TIME, "router_cost=blocks,kv_transfer_weight=0", *_LINKS)


def points(policy: str, roles: Collection[Role] = (Role.BOTH,)) -> list[str]:
    """Return the policy with each point of its grid; alone without a grid, or with given parameters."""
    if ":" in policy:
        return [policy]
    if policy == OURS:
        return [f"{policy}:{point}" for point in ours_grid(roles)]
    grid = RULES[policy].grid if policy in RULES else ()
    return [f"{policy}:{','.join(f'{key}={value:g}' for key, value in point.items())}" for point in grid] or [
        policy
    ]


def candidates(document: Document, policies: Sequence[str], sweeps: Sequence[Setting]) -> list[list[Variant]]:
    """Return, for each policy and combination of swept values, the variants that it is chosen from. Raises
    ConfigError.
    """
    roles = {workers.role for workers in load_fleet(document).fleet.workers}
    found: list[list[Variant]] = []
    for policy in policies:
        tried = points(policy, roles)
        each = variants(document, tried, sweeps)
        found += [each[at : at + len(tried)] for at in range(0, len(each), len(tried))]
    return found


def first_half(trace: Trace, n_rows: int) -> list[TraceRequest]:
    """Return the rows that rules are tuned on."""
    return list(islice(trace, n_rows // 2))


def second_half(result: Result, n_rows: int, places: Places) -> Result:
    """Return the result of the rows that rules are compared on; it lasts from their first arrival on. Its
    traffic, between domains of ``places``, is the KV that their answers began with.
    """
    outcomes = Outcomes(outcome for outcome in result.outcomes if outcome.number >= n_rows // 2)
    begins_s = min((outcome.arrived_s for outcome in outcomes), default=0.0)
    carried: dict[DomainPair, Carried] = {}
    for move, transfers in outcomes.table().moved():
        src, dst, _ = places.moved(move)
        pair = carried.setdefault(DomainPair(src, dst), Carried())
        pair.transfers += transfers
        pair.arrived_bytes += move.bytes
    return replace(result, outcomes=outcomes, carried=carried, ended_s=max(0.0, result.ended_s - begins_s))


def merit(outcomes: Outcomes) -> tuple[int, float]:
    """Return the value to minimise: the number of failures, and the mean TTFT in seconds of the others."""
    times = [outcome.ttft_s for outcome in outcomes if outcome.ttft_s is not None and not outcome.error]
    failed = len(outcomes) - len(times)
    return failed, sum(times) / len(times) if times else float("inf")

"""A dry run of a transfer policy over a recorded past: which requests the router would have refused.

No engine is simulated. The fleet at each decision is the recorded one, with the policy in place of its own,
and the router's decision shows whether a pair would have been found. Load decides which pair, and not whether
there is one, so it is left out.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Mapping
from enum import StrEnum
from typing import NamedTuple

import msgspec
import numpy as np

from kvrouter.core.errors import ConfigError, RoutingRefused
from kvrouter.core.ids import Slot
from kvrouter.core.requests import Leg
from kvrouter.core.workers import Role
from kvrouter.kernel.placement.waiting_line import DOMAIN_WAITERS_MAX
from kvrouter.kernel.routing.interface import Decision
from kvrouter.kernel.routing.masks import ready
from kvrouter.kernel.routing.route import route
from kvrouter.sim.past.past_fleet import PastFleet, leg_called
from kvrouter.sim.past.recorded_fleet import Policy
from kvrouter.sim.traces.recorded_trace import Past, PastRequest

MINUTE_S = 60.0

NO_VALUE = ""
"""Stands for an unknown value of a domain."""


class Verdict(StrEnum):
    """The effect of the policy on one request."""

    UNCHANGED = "unchanged"
    """Its KV stayed in the domain, or it moved no KV."""
    MOVED = "moved"
    """Its KV left the domain; there was a pair within one."""
    CROSSES = "crosses"
    """No pair was within a domain, and the policy lets KV cross then."""
    REFUSED = "refused"
    """It was answered, or at least placed, and no domain had a pair."""
    REFUSED_THEN = "refused_then"
    """It was not placed in the past, and would not have been."""
    NOT_PLACED_THEN = "not_placed_then"
    """It was not placed in the past, for another reason than the recorded fleet."""


class Lack(msgspec.Struct, frozen=True):
    """Requests that were refused while no worker of ``role`` in the domain's ``value`` took requests."""

    value: str
    role: Role
    requests: int


class RefusalGroup(msgspec.Struct, frozen=True):
    """Requests that were refused in the same way; ``message`` is the router's for the first one. ``role`` and
    ``domain`` are those that the refusal names; ``reasons`` are of worker ranks.
    """

    code: str
    role: str | None
    domain: str | None
    reasons: tuple[str, ...]
    requests: int
    message: str


class Minute(msgspec.Struct, frozen=True):
    """A minute with requests that would have been refused; ``at_s`` is its beginning, in seconds of the Unix
    epoch. ``requests`` are all that were decided in it.
    """

    at_s: float
    requests: int
    refused: int


class RefusedRequest(msgspec.Struct, frozen=True):
    """One request that would have been refused, and its line in the recording."""

    number: int
    at_s: float
    path: str
    line: int
    prefill_domain: str
    """The value of the domain that its KV came from in the past; empty if unknown."""


class DryRun(msgspec.Struct, frozen=True):
    """The result; ``verdicts`` are in the order of arrivals, moments in seconds of the Unix epoch."""

    verdicts: tuple[Verdict, ...]
    refused: tuple[RefusedRequest, ...]
    groups: tuple[RefusalGroup, ...]
    lacks: tuple[Lack, ...]
    minutes: tuple[Minute, ...]
    by_prefill_domain: Mapping[str, int]
    waited: int
    """Requests that were not refused because a worker came while they waited."""
    longest_wait_s: float

    def count(self, verdict: Verdict) -> int:
        """Return how many requests have this verdict."""
        return self.verdicts.count(verdict)


class _Judged(NamedTuple):
    """The router's result: a decision, or a refusal."""

    decision: Decision | None
    refused: RoutingRefused | None


class _Waiting(NamedTuple):
    """A request that waits for a decode worker to join the domain, until ``until_s``."""

    request: PastRequest
    began_s: float
    until_s: float
    refused: RoutingRefused


def _ignore(_: int) -> None:
    """Show no progress."""


def dry_run(
    past: Past, policy: Policy, *, wait_s: float = 0.0, on_decided: Callable[[int], None] = _ignore
) -> DryRun:
    """Decide each request of ``past`` again, at the moment of its first decision, under ``policy``.

    ``wait_s``: how long a request waits for a decode worker to join its domain. ``on_decided`` is called with
    the number of requests that are decided. Raises ConfigError if no
    worker was ever in the policy's domain, and for requests that a recording cannot have.
    """
    _check_level(past, policy)
    run = _Run(past, policy, wait_s)
    ordered = sorted(past.requests, key=lambda each: (_decided_s(each), each.number))
    for number, request in enumerate(ordered, 1):
        at_s = _decided_s(request)
        run.advance(at_s)
        run.decide(request, at_s)
        on_decided(number)
    run.advance(float("inf"))
    return run.result()


def _decided_s(request: PastRequest) -> float:
    attempts = request.record.attempts
    return request.at_s + (attempts[0].placed_s if attempts else 0.0)


def _check_level(past: Past, policy: Policy) -> None:
    recorded = [*past.fleet.initial.values(), *(move.recorded for move in past.fleet.moves)]
    levels = sorted({level for each in recorded for level in each.worker.domains})
    if policy.domain not in levels:
        known = ", ".join(levels) if levels else "none"
        raise ConfigError(
            f"kv-transfer-domain: no recorded worker of {past.fleet.model} has a domain {policy.domain!r}; "
            f"recorded: {known}",
            param="kv-transfer-domain",
        )


class _Run:
    """One pass over the past."""

    def __init__(self, past: Past, policy: Policy, wait_s: float) -> None:
        self._past = past
        self._policy = policy
        self._wait_s = wait_s
        self._fleet = PastFleet(past.fleet, policy=policy)
        self._ranged = self._has_ranges()
        self._judged: dict[Hashable, _Judged] = {}
        self._judged_version = self._fleet.version
        self._missing: tuple[tuple[str, Role], ...] | None = None
        self._verdicts = [Verdict.UNCHANGED] * len(past.requests)
        self._refusals: list[tuple[float, PastRequest]] = []
        self._groups: dict[Hashable, RefusalGroup] = {}
        self._lacks: Counter[tuple[str, Role]] = Counter()
        self._by_prefill: Counter[str] = Counter()
        self._all_by_minute: Counter[int] = Counter()
        self._line: deque[_Waiting] = deque()
        self._waited = 0
        self._longest_wait_s = 0.0

    def advance(self, until_s: float) -> None:
        """Change the fleet up to a moment; waiting requests are decided again after each change."""
        while (next_s := self._fleet.next_s) is not None and next_s <= until_s:
            self._give_up(next_s)
            self._fleet.step()
            self._ranged = self._has_ranges()
            waiting, self._line = self._line, deque()
            for each in waiting:
                judged = self._judge(each.request)
                if judged.refused is not None:
                    self._line.append(each._replace(refused=judged.refused))
                    continue
                self._waited += 1
                self._longest_wait_s = max(self._longest_wait_s, next_s - each.began_s)
                self._note(each.request, judged)
        self._give_up(until_s)

    def decide(self, request: PastRequest, at_s: float) -> None:
        """Decide a request, at the moment of its decision."""
        self._all_by_minute[self._minute(at_s)] += 1
        judged = self._judge(request)
        refused = judged.refused
        if refused is None:
            self._note(request, judged)
        elif refused.domain is not None and self._wait_s > 0.0 and len(self._line) < DOMAIN_WAITERS_MAX:
            self._line.append(_Waiting(request, at_s, at_s + self._wait_s, refused))
        else:
            self._refuse(request, at_s, refused)

    def result(self) -> DryRun:
        """Return the result at the end."""
        refused_by_minute: Counter[int] = Counter(self._minute(at_s) for at_s, _ in self._refusals)
        shown = sorted((request for _, request in self._refusals), key=lambda each: each.number)
        from_s = self._past.from_s
        return DryRun(
            verdicts=tuple(self._verdicts),
            refused=tuple(
                RefusedRequest(
                    each.number, from_s + each.at_s, str(each.path), each.line, self._prefill_value(each)
                )
                for each in shown
            ),
            groups=tuple(sorted(self._groups.values(), key=lambda group: -group.requests)),
            lacks=tuple(Lack(value, role, count) for (value, role), count in self._lacks.most_common()),
            minutes=tuple(
                Minute(minute * MINUTE_S, self._all_by_minute[minute], refused_by_minute[minute])
                for minute in sorted(refused_by_minute)
            ),
            by_prefill_domain=dict(self._by_prefill.most_common()),
            waited=self._waited,
            longest_wait_s=self._longest_wait_s,
        )

    def _give_up(self, now_s: float) -> None:
        """Refuse the requests with a wait that ended before ``now_s``."""
        while self._line and self._line[0].until_s < now_s:
            each = self._line.popleft()
            self._refuse(each.request, each.began_s, each.refused)

    def _minute(self, at_s: float) -> int:
        return int((self._past.from_s + at_s) // MINUTE_S)

    def _has_ranges(self) -> bool:
        return any(
            card.runtime_config.prompt_tokens_min is not None
            or card.runtime_config.prompt_tokens_max is not None
            for card in self._fleet.fleet
        )

    def _judge(self, request: PastRequest) -> _Judged:
        """Ask the router; requests that ask for the same are asked about once for each state of the fleet."""
        if self._judged_version != self._fleet.version:
            self._judged_version = self._fleet.version
            self._judged.clear()
            self._missing = None
        attempts = request.record.attempts
        aggregated = bool(attempts) and leg_called(attempts[0].legs, Leg.PREFILL) is None
        wanted = self._fleet.asks(request, aggregated=aggregated)
        tokens = wanted.isl_tokens if self._ranged else 0
        key = (
            wanted.aggregated, wanted.pin, wanted.prefill_pin, wanted.context_tokens, tokens,
            wanted.constraints.required_taints, wanted.constraints.required_decode_taints,
        )  # fmt: skip
        found = self._judged.get(key)
        if found is None:
            try:
                found = _Judged(route(wanted, self._fleet.view), None)
            except RoutingRefused as refused:
                found = _Judged(None, refused)
            self._judged[key] = found
        return found

    def _note(self, request: PastRequest, judged: _Judged) -> None:
        decision = judged.decision
        if not request.record.attempts:
            verdict = Verdict.NOT_PLACED_THEN
        elif decision is not None and decision.fallback_used:
            verdict = Verdict.CROSSES
        else:
            verdict = Verdict.UNCHANGED if self._stayed(request) else Verdict.MOVED
        self._verdicts[request.number] = verdict

    def _stayed(self, request: PastRequest) -> bool:
        """Whether the KV of its first pair stayed in one value of the domain."""
        legs = request.record.attempts[0].legs
        prefill = leg_called(legs, Leg.PREFILL)
        if prefill is None:
            return True
        level = self._policy.domain
        values = {leg.domains.get(level) for leg in legs}
        return len(values) == 1 and None not in values

    def _refuse(self, request: PastRequest, at_s: float, refused: RoutingRefused) -> None:
        was_placed = bool(request.record.attempts)
        self._verdicts[request.number] = Verdict.REFUSED if was_placed else Verdict.REFUSED_THEN
        if not was_placed:
            return
        self._refusals.append((at_s, request))
        reasons = tuple(sorted(reason.value for reason in refused.refusals))
        key = (refused.code, refused.role, refused.domain, reasons)
        known = self._groups.get(key)
        if known is None:
            known = RefusalGroup(refused.code, refused.role, refused.domain, reasons, 0, refused.message)
        self._groups[key] = msgspec.structs.replace(known, requests=known.requests + 1)
        self._lacks.update(self._roles_missing())
        self._by_prefill[self._prefill_value(request)] += 1

    def _prefill_value(self, request: PastRequest) -> str:
        leg = leg_called(request.record.attempts[0].legs, Leg.PREFILL)
        return NO_VALUE if leg is None else leg.domains.get(self._policy.domain, NO_VALUE)

    def _roles_missing(self) -> tuple[tuple[str, Role], ...]:
        """Return the values of the domain that workers have, and the roles without an available worker."""
        if self._missing is None:
            fleet, level = self._fleet.fleet, self._policy.domain
            present: defaultdict[str, set[Role]] = defaultdict(set)
            for role, leg in ((Role.PREFILL, Leg.PREFILL), (Role.DECODE, Leg.DECODE)):
                allowed = ready(fleet, leg, last_resort=True).allowed
                for slot in np.flatnonzero(fleet.columns.present).tolist():
                    roles = present[fleet.places.value_at(level, Slot(slot)) or NO_VALUE]
                    if allowed[slot]:
                        roles.add(role)
            self._missing = tuple(
                (value, role)
                for value, roles in sorted(present.items())
                if value != NO_VALUE
                for role in (Role.PREFILL, Role.DECODE)
                if role not in roles
            )
        return self._missing

"""Ready workers by domain: prefill and decode, counted by their pods' labels."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

from kvrouter.core.workers import Enforcement, Role, can_transfer
from kvrouter.operator.api.deployment import ComponentType
from kvrouter.operator.api.status import (
    BALANCE_CHARS_MAX,
    DOMAINS_MAX,
    ConditionStatus,
    DeploymentStatus,
    DomainStatus,
)
from kvrouter.operator.labels.level_labels import LevelLabels
from kvrouter.operator.labels.pods import Pod
from kvrouter.operator.plan.manifest import TYPE_LABEL
from kvrouter.operator.policy import DeploymentPolicy
from kvrouter.operator.status.available import Registered
from kvrouter.operator.status.finding import DOMAIN_BALANCED, Finding, named


@dataclass(frozen=True, slots=True)
class DomainCounts:
    """Ready workers by the value of the policy's domain, and those in an unknown place.

    Workers of type ``worker`` take decode legs, and count as decode workers. ``domains`` begins with those
    that have no decode workers, then it is by value. ``starting`` are domains with a starting decode worker;
    ``is_one_coming``: one starts in a domain that is not known yet.
    """

    domains: tuple[DomainStatus, ...] = ()
    unknown: tuple[str, ...] = ()
    starting: frozenset[str] = frozenset()
    is_one_coming: bool = False

    @property
    def lacking(self) -> tuple[DomainStatus, ...]:
        """The domains with prefill workers and without decode workers."""
        return tuple(domain for domain in self.domains if domain.prefill and not domain.decode)

    @property
    def idle(self) -> tuple[DomainStatus, ...]:
        """The domains with decode workers and without prefill workers."""
        return tuple(domain for domain in self.domains if domain.decode and not domain.prefill)


def domain_counts_of(pods: Iterable[Pod], level: LevelLabels, *, decode_replicas: int = 0) -> DomainCounts:
    """Count the Ready workers among ``pods`` by the pod label of ``level``.

    ``decode_replicas`` is the desired number of pods that take decode legs.
    """
    counts: dict[str, tuple[int, int]] = {}
    unknown, starting = [], set[str | None]()
    decode_pods = 0
    for pod in pods:
        kind = pod.labels.get(TYPE_LABEL)
        if pod.is_over or kind in (None, ComponentType.FRONTEND.value):
            continue
        is_prefill = kind == ComponentType.PREFILL.value
        decode_pods += not is_prefill
        value = pod.labels.get(level.pod_label)
        if not pod.is_ready:
            if not (is_prefill or pod.is_stuck):
                starting.add(value)
        elif not value:
            unknown.append(pod.name)
        else:
            prefill, decode = counts.get(value, (0, 0))
            counts[value] = (prefill + is_prefill, decode + (not is_prefill))
    found = [
        DomainStatus(value=value, prefill=prefill, decode=decode)
        for value, (prefill, decode) in counts.items()
    ]
    found.sort(key=lambda domain: (bool(domain.decode) or not domain.prefill, domain.value))
    return DomainCounts(
        tuple(found),
        tuple(sorted(unknown)),
        starting=frozenset(value for value in starting if value),
        is_one_coming=None in starting or decode_pods < decode_replicas,
    )


def balance_of(domains: Sequence[DomainStatus]) -> str | None:
    """Return ``us-east-1a 4/8, us-east-1b 4/0``: prefill and decode workers; None without domains.

    Domains that do not fit into the column are counted: ``and 12 more``.
    """
    shown = [f"{domain.value} {domain.prefill}/{domain.decode}" for domain in domains]
    for count in range(len(shown), 0, -1):
        more = len(shown) - count
        text = ", ".join(shown[:count]) + (f" and {more} more" if more else "")
        if len(text) <= BALANCE_CHARS_MAX:
            return text
    return None


def domain_statuses(counts: DomainCounts) -> tuple[DomainStatus, ...]:
    """Return the first :data:`DOMAINS_MAX` domains."""
    return counts.domains[:DOMAINS_MAX]


def had_decode(previous: DeploymentStatus | None, policy: DeploymentPolicy) -> frozenset[str]:
    """Return the domains that had decode workers, or were reported to lack them: their start is over."""
    if previous is None or previous.policy is None or previous.policy.domain != policy.domain:
        return frozenset()
    was_reported = any(
        (condition.type, condition.reason) == (DOMAIN_BALANCED, "DomainWithoutDecode")
        for condition in previous.conditions
    )
    return frozenset(
        domain.value for domain in previous.domains if domain.decode or (was_reported and domain.prefill)
    )


def parted_domains(workers: Iterable[Registered], domain: str) -> list[str]:
    """Return the values of ``domain`` where workers of both roles take requests of a model, and no decode
    worker can take the KV of a prefill worker.
    """
    there: dict[tuple[str, str], list[Registered]] = {}
    for each in workers:
        value = each.domains.get(domain)
        if value and each.takes_requests:
            there.setdefault((value, each.model), []).append(each)
    parted = set[str]()
    for (value, _), here in there.items():
        senders = [each.kv_format for each in here if each.role is Role.PREFILL]
        receivers = [each.kv_format for each in here if each.role is not Role.PREFILL]
        talks = any(can_transfer(sent, taken) for sent, taken in product(senders, receivers))
        if senders and receivers and not talks:
            parted.add(value)
    return sorted(parted)


def balanced(
    counts: DomainCounts,
    policy: DeploymentPolicy,
    *,
    has_prefill: bool,
    started: frozenset[str] = frozenset(),
    parted: Sequence[str] = (),
) -> Finding:
    """Return the ``DomainBalanced`` finding: whether every domain with prefill workers has decode workers,
    and is not ``parted``.

    A domain with starting decode workers is not reported to lack them, unless it is among ``started``.
    """
    domain = policy.domain
    if not has_prefill:
        message = "no component is of type prefill: no KV goes from one worker to another"
        return Finding(ConditionStatus.TRUE, "NotDisaggregated", message)
    lacking = [found.value for found in counts.lacking]
    waiting = {
        value
        for value in lacking
        if value not in started and (counts.is_one_coming or value in counts.starting)
    }
    if len(waiting) < len(lacking):
        values = [value for value in lacking if value not in waiting]
        message = (
            f"{domain} {named(values)}: prefill workers, and no Ready decode worker. {_consequence(policy)} "
            f"Let decode workers be scheduled there, or take the prefill workers away."
        )
        return Finding(ConditionStatus.FALSE, "DomainWithoutDecode", message + _unknown(counts))
    if parted:
        message = (
            f"{domain} {named(parted)}: no decode worker can take the KV of a prefill worker there, of "
            f"another engine, version or connector. {_consequence(policy)} "
            f"Upgrade both roles of a {domain} together."
        )
        return Finding(ConditionStatus.FALSE, "DomainWithoutPair", message + _unknown(counts))
    if waiting:
        message = f"{domain} {named(waiting)}: the first decode workers are starting" + _unknown(counts)
        return Finding(ConditionStatus.UNKNOWN, "DecodeStarting", message)
    if not any(found.prefill for found in counts.domains):
        message = "no prefill worker is Ready and knows its place yet" + _unknown(counts)
        return Finding(ConditionStatus.UNKNOWN, "NoReadyPrefill", message)
    message = f"every {domain} with prefill workers has decode workers: {balance_of(counts.domains)}"
    if counts.idle and policy.enforcement is not Enforcement.PREFERRED:
        idle = named(found.value for found in counts.idle)
        message += f". Decode workers of {idle} get no KV of their own {domain}: no prefill worker is there"
    return Finding(ConditionStatus.TRUE, "DomainsBalanced", message + _unknown(counts))


def _consequence(policy: DeploymentPolicy) -> str:
    match policy.enforcement:
        case Enforcement.REQUIRED:
            return "Requests go to prefill workers of other domains, and get 503 while there are none."
        case Enforcement.FALLBACK | Enforcement.PREFERRED:
            return f"Their KV leaves its {policy.domain}."


def _unknown(counts: DomainCounts) -> str:
    if not counts.unknown:
        return ""
    return f". The place of {len(counts.unknown)} Ready workers is unknown: {named(counts.unknown)}"

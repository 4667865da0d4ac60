"""The ``Available`` condition: whether registered workers can serve, as a router would decide."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvrouter.core.workers import FORMAT_UNKNOWN, Enforcement, KvFormat, Role, can_transfer
from kvrouter.kernel.topology.policy import Required, TransferPolicy
from kvrouter.operator.api.deployment import ComponentSpec, ComponentType
from kvrouter.operator.api.status import ConditionStatus
from kvrouter.operator.labels.pods import Pod
from kvrouter.operator.plan.manifest import COMPONENT_LABEL, TYPE_LABEL
from kvrouter.operator.policy import DeploymentPolicy
from kvrouter.operator.status.finding import Finding, named


@dataclass(frozen=True, slots=True)
class Registered:
    """One worker as discovery shows it. ``policy`` is its own; ``pod`` is its pod's name, empty if unknown;
    ``worker_id`` is its id in metrics.

    ``takes_requests``: it does not drain, and its engine answers.
    """

    model: str
    role: Role
    takes_requests: bool = True
    domains: Mapping[str, str] = field(default_factory=dict)
    policy: TransferPolicy | None = None
    pod: str = ""
    worker_id: int = 0
    kv_format: KvFormat = FORMAT_UNKNOWN


@dataclass(frozen=True, slots=True)
class Workers:
    """The registered workers; ``unknown_because`` is why they are unknown, empty if they are known."""

    registered: Sequence[Registered] = ()
    unknown_because: str = ""


def available(
    components: Sequence[ComponentSpec],
    policy: DeploymentPolicy | None,
    pods: Iterable[Pod],
    workers: Workers,
) -> Finding:
    """Return the ``Available`` finding: whether a request would be served if all workers were idle."""
    return (
        _without_frontend(components, pods)
        or _without_workers(components, workers)
        or _by_model(workers.registered, policy)
    )


def serves(workers: Sequence[Registered], policy: DeploymentPolicy | None) -> bool:
    """Return whether a router can place a plain request on these workers of one model.

    ``policy`` is the frontends', which applies to prefill workers that publish no policy.
    """
    decode_workers = [each for each in workers if each.takes_requests and each.role is not Role.PREFILL]
    prefill_workers = [each for each in workers if each.takes_requests and each.role is Role.PREFILL]
    if not decode_workers or not prefill_workers:
        return bool(decode_workers)
    return any(_may_hand_on(prefill, decode_workers, policy) for prefill in prefill_workers)


def role_mistakes(pods: Iterable[Pod], workers: Workers) -> list[str]:
    """Return a line for each component with workers that register with another role than its type."""
    by_name = {pod.name: pod for pod in pods}
    found: dict[str, tuple[str, set[str]]] = {}
    for each in workers.registered:
        labels = by_name[each.pod].labels if each.pod in by_name else {}
        kind = labels.get(TYPE_LABEL, "")
        wanted = ComponentType(kind).role if kind in {*ComponentType} else None
        if wanted is not None and each.role is not wanted:
            found.setdefault(labels.get(COMPONENT_LABEL, kind), (kind, set()))[1].add(each.role.value)
    return [
        f"component {name} is of type {kind}, and its workers register as {named(roles)}: start them with "
        f"--role {ComponentType(kind).role}, or move them to a component of their own type"
        for name, (kind, roles) in sorted(found.items())
    ]


def _without_frontend(components: Sequence[ComponentSpec], pods: Iterable[Pod]) -> Finding | None:
    frontends = [each for each in components if each.type is ComponentType.FRONTEND]
    if not frontends:
        message = "no component is of type frontend: nobody takes requests"
        return Finding(ConditionStatus.FALSE, "NoFrontend", message)
    if not any(each.replicas for each in frontends):
        message = f"{named(each.name for each in frontends)}: scaled to 0, so nobody takes requests"
        return Finding(ConditionStatus.FALSE, "ScaledToZero", message)
    if not any(_is_ready_frontend(pod) for pod in pods):
        message = "no frontend is Ready: kubectl describe pod shows what they wait for"
        return Finding(ConditionStatus.FALSE, "NoReadyFrontend", message)
    return None


def _without_workers(components: Sequence[ComponentSpec], workers: Workers) -> Finding | None:
    """Return the finding if no worker is registered, or the registered ones are unknown; else None."""
    if workers.registered:
        return None
    ours = [each for each in components if each.type.is_worker]
    if not any(each.replicas for each in ours):
        message = "every component with workers is scaled to 0: requests get 503"
        return Finding(ConditionStatus.FALSE, "ScaledToZero", message)
    if not workers.unknown_because:
        message = "no worker is registered: requests get 503. The workers' own logs say what they wait for"
        return Finding(ConditionStatus.FALSE, "NoWorkers", message)
    if not any(each.replicas for each in ours if each.type is not ComponentType.PREFILL):
        message = "no component with a worker that decodes has replicas: requests get 503"
        return Finding(ConditionStatus.FALSE, "NoDecodeWorkers", message)
    message = f"nobody can tell which workers are registered: {workers.unknown_because}"
    return Finding(ConditionStatus.UNKNOWN, "WorkersUnknown", message)


def _by_model(registered: Sequence[Registered], policy: DeploymentPolicy | None) -> Finding:
    models: dict[str, list[Registered]] = {}
    for each in registered:
        models.setdefault(each.model, []).append(each)
    unserved = [name for name in sorted(models) if not serves(models[name], policy)]
    if not unserved:
        decode_workers = sum(each.takes_requests for each in registered)
        message = f"requests for {named(models)} are served: {decode_workers} workers take them"
        return Finding(ConditionStatus.TRUE, "RequestsServed", message)
    first = _why_not(models[unserved[0]], policy)
    message = f"requests for {named(unserved)} get 503: {first.message}"
    if len(unserved) < len(models):
        message += f". {named(set(models) - set(unserved))} are served"
    return first._replace(message=message)


def _why_not(workers: Sequence[Registered], policy: DeploymentPolicy | None) -> Finding:
    """Return why a model is not served."""
    decoders = [each for each in workers if each.role is not Role.PREFILL]
    if not decoders:
        why = f"{len(workers)} prefill workers are registered, and none that decodes"
        return Finding(ConditionStatus.FALSE, "NoDecodeWorkers", why)
    decode_workers = [each for each in decoders if each.takes_requests]
    if not decode_workers:
        why = f"{len(decoders)} workers decode, and all of them drain or lost their engine"
        return Finding(ConditionStatus.FALSE, "WorkersLeaving", why)
    prefill_workers = [each for each in workers if each.takes_requests and each.role is Role.PREFILL]
    rule = next(found for each in prefill_workers if isinstance(found := _policy_of(each, policy), Required))
    here = named({each.domains.get(rule.domain, "nowhere") for each in prefill_workers})
    there = named({each.domains.get(rule.domain, "nowhere") for each in decode_workers})
    why = f"KV may not leave its {rule.domain}, prefill workers are in {here}, and decode workers in {there}"
    return Finding(ConditionStatus.FALSE, "NoPairInDomain", why)


def _may_hand_on(
    prefill: Registered, decode_workers: Sequence[Registered], policy: DeploymentPolicy | None
) -> bool:
    rule = _policy_of(prefill, policy)
    if not isinstance(rule, Required):
        return True
    value = prefill.domains.get(rule.domain)
    return value is not None and any(
        each.domains.get(rule.domain) == value and can_transfer(prefill.kv_format, each.kv_format)
        for each in decode_workers
    )


def _policy_of(prefill: Registered, policy: DeploymentPolicy | None) -> TransferPolicy | None:
    """Return the worker's own policy, else the frontends', which cannot state ``preferred``."""
    if prefill.policy is not None or policy is None or policy.enforcement is Enforcement.PREFERRED:
        return prefill.policy
    return policy.transfer


def _is_ready_frontend(pod: Pod) -> bool:
    return pod.labels.get(TYPE_LABEL) == ComponentType.FRONTEND.value and pod.is_ready and not pod.is_over

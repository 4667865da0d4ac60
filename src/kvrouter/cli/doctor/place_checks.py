"""Checks of places: topology labels, zones without a role, KV that leaves its domain."""

from collections.abc import Iterator

from kvrouter.api.fleet_schema import Model, Policy, Worker
from kvrouter.cli.doctor.findings import Check, Compared, NotEnough, Outcome, Problem, Severity
from kvrouter.cli.doctor.reading import Reading, counted, first_of, policies_of
from kvrouter.core.errors import Reason
from kvrouter.core.workers import Enforcement, Role

CROSSED_SHARE = 0.01
"""A smaller share of all is a note, and no warning."""

BY_ENFORCEMENT: dict[str, Severity] = {
    Enforcement.REQUIRED: Severity.CRITICAL,
    Enforcement.FALLBACK: Severity.WARNING,
    Enforcement.PREFERRED: Severity.NOTE,
}
"""How bad a domain without one of the roles is."""

LABEL_REMEDY = (
    "give it its topology: DYN_TOPOLOGY_ENABLED=true and the mounted labels on Kubernetes, domains in a "
    "fleet "
    "file; docs/topology.md"
)


def labels(reading: Reading) -> Iterator[Outcome]:
    """Workers without a place, though others have one or a policy needs it."""
    placed = sum(bool(worker.domains) for worker in reading.fleet.workers)
    yield Compared(f"{placed} of {reading.workers_compared} with a topology")
    for model in reading.fleet.models:
        workers = reading.fleet.workers_of(model)
        needed = [policy for policy in policies_of(model, workers) if _has_pairs(workers)]
        for worker in workers:
            lacking = [policy for policy in needed if not worker.domains.get(policy.domain)]
            if lacking:
                is_required = any(policy.enforcement == Enforcement.REQUIRED for policy in lacking)
                yield Problem(
                    Severity.CRITICAL if is_required else Severity.WARNING,
                    str(worker),
                    f"it publishes no {first_of(policy.domain for policy in lacking)}",
                    "under required no request is served by it together with another worker"
                    if is_required
                    else "its transfers count as crossing the domain",
                    LABEL_REMEDY,
                )
            elif not worker.domains and any(other.domains for other in workers):
                yield Problem(
                    Severity.WARNING,
                    str(worker),
                    "it publishes no topology, and other workers of its model do",
                    "the router weighs its links as unknown, and no policy or taint of a place reaches it",
                    LABEL_REMEDY,
                )


def zones(reading: Reading) -> Iterator[Outcome]:
    """Values of a policy's domain in which one of the roles has no available worker."""
    policies = {
        (policy.domain, worker.domains[policy.domain])
        for model in reading.fleet.models
        for policy in policies_of(model, reading.fleet.workers_of(model))
        for worker in reading.fleet.workers_of(model)
        if policy.domain in worker.domains
    }
    handing = "" if reading.hands_over else ": no prefill worker hands KV over"
    yield Compared(f"{counted(len(policies), 'domain')} of transfer policies{handing}")
    for model in reading.fleet.models:
        workers = reading.fleet.workers_of(model)
        if _has_pairs(workers):
            for policy in policies_of(model, workers):
                yield from _zones_of(model, policy, workers)
        yield from _near_frontend(model, workers)


def _has_pairs(workers: list[Worker]) -> bool:
    """Whether KV goes from one worker to another at all."""
    return any(worker.role == Role.PREFILL for worker in workers)


def _zones_of(model: Model, policy: Policy, workers: list[Worker]) -> Iterator[Outcome]:
    domain = policy.domain
    able = [worker for worker in workers if worker.takes_requests and domain in worker.domains]
    prefill = {worker.domains[domain] for worker in able if worker.role == Role.PREFILL}
    decode = {worker.domains[domain] for worker in able if worker.decodes}
    consequences: dict[str, str] = {
        Enforcement.REQUIRED: "a prompt that is prefilled there cannot be decoded anywhere: its workers are "
        "passed over, and where they are all that is left requests get 503",
        Enforcement.FALLBACK: "KV from there crosses the domain: later first tokens, and paid bytes",
        Enforcement.PREFERRED: "KV from there always crosses the domain",
    }
    for value in sorted(prefill - decode):
        yield Problem(
            BY_ENFORCEMENT.get(policy.enforcement, Severity.NOTE),
            f"{domain}={value} ({model.model})",
            f"prefill workers take requests there and no decode worker does; the transfer policy is "
            f"{policy.enforcement} on {domain}",
            consequences.get(policy.enforcement, "this kvrouter does not know such a policy"),
            f"start decode workers in {value}, or mend those that are there; kvrouter worth says what "
            "another "
            "policy would change",
        )
    if policy.enforcement != Enforcement.REQUIRED:
        return
    for value in sorted({worker.domains[domain] for worker in able if worker.role == Role.DECODE} - prefill):
        yield Problem(
            Severity.WARNING,
            f"{domain}={value} ({model.model})",
            f"decode workers take requests there and no prefill worker does; the transfer policy is required "
            f"on {domain}",
            "no KV may reach them: their capacity is idle, but for prompts that they prefill for themselves",
            f"start prefill workers in {value}, or move these decode workers",
        )


def _near_frontend(model: Model, workers: list[Worker]) -> Iterator[Outcome]:
    near = model.prefill_near
    if near is None:
        return
    able = [worker for worker in workers if worker.takes_requests and worker.prefills]
    if near.value is not None and any(worker.domains.get(near.domain) == near.value for worker in able):
        return
    where = "its own is not known" if near.value is None else f"none is in {near.domain}={near.value}"
    yield Problem(
        Severity.CRITICAL if near.required else Severity.WARNING,
        f"the frontend ({model.model})",
        f"prefill keeps to the frontend's own {near.domain}, and of {len(able)} workers that prefill {where}",
        "no prompt may be prefilled: 503 no_eligible_worker, far_from_frontend"
        if near.required
        else "every prompt is prefilled in another place than the frontend's",
        f"start workers that prefill in the frontend's {near.domain}, move the frontend, or leave out "
        "--router-prefill-level",
    )


def crossings(reading: Reading) -> Iterator[Outcome]:
    """Handoffs that left the domain that they should have stayed in."""
    crossed = reading.counts.total("kvrouter_fallbacks_total")
    handoffs = reading.counts.total("kvrouter_handoffs_total")
    yield Compared(f"{counted(handoffs, 'handoff')} {reading.period}")
    if reading.hands_over and not handoffs:
        yield NotEnough("handoffs", f"none {reading.period}")
    if crossed:
        domains = first_of(reading.counts.by("kvrouter_fallbacks_total", "domain"))
        yield Problem(
            Severity.WARNING if crossed >= CROSSED_SHARE * handoffs else Severity.NOTE,
            f"transfers over {domains}",
            f"{crossed:g} of {handoffs:g} handoffs left their {domains} {reading.period}: no decode worker "
            "was "
            "left in it",
            "later first tokens, and paid bytes between zones",
            "add decode workers where prefill has none that are free; kvrouter explain --request-id ID "
            "shows a "
            "single decision",
        )


def formats(reading: Reading) -> Iterator[Outcome]:
    """Workers whose KV no available worker can take, or hand to them, and the capacity that this costs."""
    handing = "" if reading.hands_over else ": no prefill worker hands KV over"
    yield Compared(f"{reading.workers_compared}{handing}")
    for worker in reading.fleet.workers:
        if worker.kv_partners != 0 or not worker.takes_requests:
            continue
        own = ", ".join(f"{part} {value}" for part, value in worker.kv_format.items())
        other, does = ("decode", "take its KV") if worker.role == Role.PREFILL else ("prefill", "hand it KV")
        yield Problem(
            Severity.WARNING,
            str(worker),
            f"no {other} worker that takes requests can {does}: its own is {own or 'of no known format'}",
            "it gets no prompts" if worker.role == Role.PREFILL else "it serves without prefill workers",
            f"start {other} workers of the same engine, version and connector, or finish the upgrade "
            "(kv_format; docs/topology.md)",
        )
    for model in reading.fleet.models:
        for pair in model.parted_pairs:
            if pair.reason != Reason.CANNOT_TRANSFER:
                continue
            yield Problem(
                Severity.WARNING,
                f"workers {pair.prefill_worker_id} and {pair.decode_worker_id} ({model.model})",
                "their engines refuse each other's KV, though nothing that is known of their formats differs",
                "they are no pair, nor are workers like them, until one restarts or a new try succeeds",
                "compare version and configuration of both engines, whose logs say why the handshake failed, "
                "and state what differs as kv_format (docs/topology.md)",
            )
        if model.pair_capacity < 1.0:
            yield Problem(
                Severity.NOTE,
                f"model {model.model}",
                f"KV formats leave {model.pair_capacity:.0%} of the capacity of its pairs",
                "prefill workers of one version wait while decode workers of another are idle, or the other "
                "way round",
                "upgrade as many prefill as decode workers at a time",
            )


CHECKS = (
    Check("labels", "every worker says where it is, where that is needed", labels),
    Check("zones", "every domain of a transfer policy has both roles", zones),
    Check("crossings", "KV stays in its domain", crossings),
    Check("formats", "prefill and decode workers can hand KV to each other", formats),
)

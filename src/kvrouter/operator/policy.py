"""Reads the KV transfer policy of a deployment, in either of its two spellings."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from kvrouter.core.constraints import NearEnforcement
from kvrouter.core.workers import Enforcement
from kvrouter.kernel.topology.policy import Fallback, MismatchPolicy, Preferred, Required, TransferPolicy
from kvrouter.operator.api.deployment import (
    ComponentSpec,
    ComponentType,
    DeploymentSpec,
    KvTransferPolicy,
    PrefillTopology,
)
from kvrouter.operator.api.qos import NetworkQoS
from kvrouter.settings.problems import Path, Problem, dotted

GRAPH_POLICY: Path = ("spec", "experimental", "kvTransferPolicy")
TOPOLOGY_NAME: Path = ("spec", "topologyConstraint", "clusterTopologyName")
Value = TypeVar("Value")
A_LABEL = "the key of a node label such as topology.kubernetes.io/zone"


@dataclass(frozen=True, slots=True)
class NamedTopology:
    """A Grove topology by name: the domain is one of its levels."""

    name: str

    def __str__(self) -> str:
        return f"clusterTopologyName {self.name}"


@dataclass(frozen=True, slots=True)
class RawLabel:
    """A node label by key: its values are the domain's values, and no topology is read."""

    key: str

    def __str__(self) -> str:
        return f"label {self.key}"


LabelSource = NamedTopology | RawLabel


@dataclass(frozen=True, slots=True)
class DeploymentPolicy:
    """A deployment's transfer policy, and the source of its domain's values."""

    transfer: TransferPolicy
    source: LabelSource

    @property
    def domain(self) -> str:
        """The domain that KV transfers keep to."""
        return self.transfer.domain

    @property
    def enforcement(self) -> Enforcement:
        """How strictly KV transfers keep to the domain."""
        match self.transfer:
            case Required():
                return Enforcement.REQUIRED
            case Fallback():
                return Enforcement.FALLBACK
            case Preferred():
                return Enforcement.PREFERRED

    @property
    def preferred_weight(self) -> float | None:
        """The weight under ``preferred``; None under ``required`` and ``fallback``."""
        return self.transfer.weight if isinstance(self.transfer, Preferred) else None

    def __str__(self) -> str:
        weight = "" if self.preferred_weight is None else f" {self.preferred_weight:g}"
        return f"{self.enforcement}{weight} in {self.domain} of {self.source}"


class Declared(NamedTuple):
    """A policy and the paths where it is written: ``at``, and those of its domain and its source."""

    policy: DeploymentPolicy
    at: Path
    domain_at: Path
    source_at: Path


class FrontendSettings(NamedTuple):
    """Settings of frontends besides the policy, each with its path; None if no frontend states it.

    ``weight`` is that of KV transfers, ``qos`` the links, ``prefill`` where prompts are prefilled.
    """

    weight: float | None = None
    weight_at: Path = ()
    qos: NetworkQoS | None = None
    qos_at: Path = ()
    prefill: PrefillTopology | None = None
    prefill_at: Path = ()


class PolicyReading(NamedTuple):
    """The policy that a spec declares first, the problems with it, and the settings of frontends."""

    declared: Declared | None
    problems: tuple[Problem, ...] = ()
    settings: FrontendSettings = FrontendSettings()

    @property
    def policy(self) -> DeploymentPolicy | None:
        """The policy; None without one, or when problems leave it undetermined."""
        return None if self.declared is None or self.problems else self.declared.policy


def read_policy(spec: DeploymentSpec) -> PolicyReading:
    """Return the policy of ``spec``, in either spelling; both spellings, or several frontends, must agree."""
    declared: list[Declared] = []
    problems: list[Problem] = []
    for index, component in enumerate(spec.components):
        if component.kv_cache_transfer_topology is not None:
            _read(_of_component(component, ("spec", "components", index), spec), declared, problems)
    graph_policy = None if spec.experimental is None else spec.experimental.kv_transfer_policy
    if graph_policy is not None:
        _read(_of_graph(graph_policy), declared, problems)
    problems += [
        Problem(
            other.at,
            f"says {other.policy}, but {dotted(declared[0].at)} says {declared[0].policy}: "
            "remove one of them, or make them say the same",
        )
        for other in declared[1:]
        if other.policy != declared[0].policy
    ]
    settings = _settings(spec, problems)
    return PolicyReading(declared[0] if declared else None, tuple(problems), settings)


def _settings(spec: DeploymentSpec, problems: list[Problem]) -> FrontendSettings:
    """Return the frontends' settings. A frontend that leaves one out gets that of another."""
    weights: list[tuple[Path, float]] = []
    tables: list[tuple[Path, NetworkQoS]] = []
    prefills: list[tuple[Path, PrefillTopology]] = []
    for index, component in enumerate(spec.components):
        field = component.kv_cache_transfer_topology
        at: Path = ("spec", "components", index, "kvCacheTransferTopology")
        if field is not None and field.kv_transfer_weight is not None:
            weights.append(((*at, "kvTransferWeight"), field.kv_transfer_weight))
        if field is not None and field.network_qos is not None:
            tables.append(((*at, "networkQoS"), field.network_qos))
            problems += _repeated(field.network_qos, (*at, "networkQoS"))
        if field is not None and field.prefill is not None:
            prefills.append(((*at, "prefill"), field.prefill))
            if field.prefill.weight is not None and field.prefill.enforcement is NearEnforcement.REQUIRED:
                must = "is only for enforcement: preferred: remove it, or say preferred"
                problems.append(Problem((*at, "prefill", "weight"), must))
    weight_at, weight = _same(weights, problems)
    qos_at, qos = _same(tables, problems)
    prefill_at, prefill = _same(prefills, problems)
    return FrontendSettings(weight, weight_at, qos, qos_at, prefill, prefill_at)


def _same(stated: Sequence[tuple[Path, Value]], problems: list[Problem]) -> tuple[Path, Value | None]:
    """Return the first stated value and its path; add a problem for each that differs."""
    if not stated:
        return (), None
    first_at, first = stated[0]
    problems += [
        Problem(at, f"is not what {dotted(first_at)} says: remove one of them, or make them say the same")
        for at, value in stated
        if value != first
    ]
    return first_at, first


def _repeated(qos: NetworkQoS, at: Path) -> Iterator[Problem]:
    """Yield a problem for each link that is stated twice."""
    levels = [each.level for each in qos.levels]
    for index, level in enumerate(levels):
        if level in levels[:index]:
            yield Problem((*at, "levels", index, "level"), f"{level!r} is there twice: remove one of them")
    places = [each.place for each in qos.pairs]
    for index, place in enumerate(places):
        if place in places[:index]:
            level, one, other = place
            must = f"{one!r} and {other!r} of {level} are there twice: remove one of them"
            yield Problem((*at, "pairs", index, "between"), must)


def _read(found: Declared | list[Problem], declared: list[Declared], problems: list[Problem]) -> None:
    if isinstance(found, Declared):
        declared.append(found)
    else:
        problems += found


def _of_component(component: ComponentSpec, place: Path, spec: DeploymentSpec) -> Declared | list[Problem]:
    """Read the frontend's spelling; its source is the deployment's topology unless it names a label."""
    field = component.kv_cache_transfer_topology
    if field is None:
        return []
    at = (*place, "kvCacheTransferTopology")
    problems = []
    if component.type is not ComponentType.FRONTEND:
        problems.append(
            Problem(
                at,
                f"belongs to the component of type frontend, and {component.name} is of type "
                f"{component.type}: move it there",
            )
        )
    constraint = spec.topology_constraint
    source: LabelSource
    if field.label is not None:
        source, source_at = RawLabel(field.label), (*at, "label")
    elif constraint is not None:
        source, source_at = NamedTopology(constraint.cluster_topology_name), TOPOLOGY_NAME
    else:
        problems.append(
            Problem(
                at,
                f"{_no_source(field.level)}: set {dotted(TOPOLOGY_NAME)} to one of Grove's topologies, or "
                f"{dotted((*at, 'label'))} to {A_LABEL}",
            )
        )
        return problems
    if problems:
        return problems
    fail = field.mismatch_policy is MismatchPolicy.FAIL
    transfer = Required(field.level) if fail else Fallback(field.level)
    return Declared(DeploymentPolicy(transfer, source), at, (*at, "level"), source_at)


def _of_graph(field: KvTransferPolicy) -> Declared | list[Problem]:
    """Read the whole graph's spelling, which names its own source."""
    problems = []
    source: LabelSource | None = None
    source_at = GRAPH_POLICY
    if field.label_key is not None and field.cluster_topology_name is not None:
        problems.append(
            Problem(GRAPH_POLICY, "has both labelKey and clusterTopologyName: remove one of them")
        )
    elif field.label_key is not None:
        source, source_at = RawLabel(field.label_key), (*GRAPH_POLICY, "labelKey")
    elif field.cluster_topology_name is not None:
        source = NamedTopology(field.cluster_topology_name)
        source_at = (*GRAPH_POLICY, "clusterTopologyName")
    else:
        problems.append(
            Problem(
                GRAPH_POLICY,
                f"{_no_source(field.domain)}: set clusterTopologyName to one of Grove's topologies, "
                f"or labelKey to {A_LABEL}",
            )
        )
    transfer = _transfer(field)
    if isinstance(transfer, Problem):
        problems.append(transfer)
    elif source is not None:
        at = GRAPH_POLICY
        return Declared(DeploymentPolicy(transfer, source), at, (*at, "domain"), source_at)
    return problems


def _no_source(domain: str) -> str:
    return f"does not say where the values of {domain!r} come from"


def _transfer(field: KvTransferPolicy) -> TransferPolicy | Problem:
    at = (*GRAPH_POLICY, "preferredWeight")
    weight = field.preferred_weight
    if field.enforcement is Enforcement.PREFERRED:
        if weight is None:
            return Problem(at, "is required when enforcement is preferred: a number from 0 to 1")
        return Preferred(field.domain, weight)
    if weight is not None:
        return Problem(
            at, f"is only for enforcement: preferred, not {field.enforcement}: remove it, or say preferred"
        )
    return Required(field.domain) if field.enforcement is Enforcement.REQUIRED else Fallback(field.domain)

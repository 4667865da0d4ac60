"""A component's Deployment and the frontends' Service."""

from collections.abc import Iterator

from pydantic import JsonValue

from kvrouter.operator.api.deployment import (
    API_VERSION,
    BELOW_DEADLINE,
    KIND,
    OF_FRONTENDS,
    ComponentSpec,
    ComponentType,
    DynamoGraphDeployment,
    FrontendService,
)
from kvrouter.operator.api.names import is_nothing
from kvrouter.operator.api.rollout import ONLY_ROLLING, PROGRESS_DEADLINE_S, WARM_UP_S, StrategyType
from kvrouter.operator.plan.manifest import (
    TEMPLATE_HASH,
    Manifest,
    labels_of,
    object_name,
    selector,
    strings,
    template_hash,
)
from kvrouter.operator.plan.shared import annotation_problems
from kvrouter.settings.problems import Path, Problem


def owned_metadata(
    deployment: DynamoGraphDeployment, name: str, labels: Manifest, annotations: Manifest | None = None
) -> Manifest:
    """Return the metadata of an object that is deleted with its deployment; it has the deployment's shared
    labels and annotations.
    """
    of = deployment.metadata
    found: Manifest = {"name": name}
    if of.namespace:
        found["namespace"] = of.namespace
    found["labels"] = {**deployment.spec.labels, **labels}
    if annotations or deployment.spec.annotations:
        found["annotations"] = {**deployment.spec.annotations, **(annotations or {})}
    if of.uid:
        owner: JsonValue = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "name": of.name,
            "uid": of.uid,
            "controller": True,
            "blockOwnerDeletion": True,
        }
        found["ownerReferences"] = [owner]
    return found


def component_metadata(
    deployment: DynamoGraphDeployment, component: ComponentSpec, annotations: Manifest | None = None
) -> Manifest:
    """Return the metadata of a component's objects."""
    name = object_name(deployment.metadata.name, component.name)
    return owned_metadata(deployment, name, labels_of(deployment, component), annotations)


IN_PLACE = "under spec.upgrade a worker ends before the new one takes its place"


def is_staged(deployment: DynamoGraphDeployment, component: ComponentSpec) -> bool:
    """Return whether ``spec.upgrade`` stages the changes of a component."""
    return deployment.spec.upgrade is not None and component.type.is_worker


def min_ready_s(deployment: DynamoGraphDeployment, component: ComponentSpec) -> int | None:
    """Return for how many seconds a new pod must be Ready; None where Kubernetes' own 0 is left."""
    is_left_out = component.min_ready_seconds is None
    return WARM_UP_S if is_left_out and is_staged(deployment, component) else component.min_ready_seconds


def pods_at_a_time(component: ComponentSpec, replicas: int) -> int:
    """Return how many of ``replicas`` pods may be missing at a time, and at least 1."""
    stated = _rolling_update(component)["maxUnavailable"]
    n_pods = stated if isinstance(stated, int) else replicas * int(stated.rstrip("%")) // 100
    return max(1, n_pods)


def rollout_problems(deployment: DynamoGraphDeployment, component: ComponentSpec, at: Path) -> list[Problem]:
    """Return the problems with the rollout and the Service of a component at the path ``at``."""
    problems = [*_staging_problems(component, at)] if is_staged(deployment, component) else []
    rolling = _rolling_update(component)
    if component.strategy is not None and component.strategy.rolling_update is not None:
        place = (*at, "strategy", "rollingUpdate")
        if component.strategy.type is StrategyType.RECREATE:
            problems.append(Problem(place, ONLY_ROLLING))
        elif all(is_nothing(amount) for amount in rolling.values()):
            stated = " and ".join(f"{name} {amount}" for name, amount in rolling.items())
            problems.append(Problem(place, f"comes to {stated}: no pod could be replaced, so raise one"))
    if (min_ready_s(deployment, component) or 0) >= (
        component.progress_deadline_seconds or PROGRESS_DEADLINE_S
    ):
        problems.append(Problem((*at, "minReadySeconds"), BELOW_DEADLINE))
    if component.service is not None:
        if component.type is not ComponentType.FRONTEND:
            problems.append(Problem((*at, "service"), OF_FRONTENDS))
        annotations = component.service.annotations
        problems += annotation_problems(annotations, (*at, "service", "annotations"))
    return problems


def _staging_problems(component: ComponentSpec, at: Path) -> Iterator[Problem]:
    stated = component.strategy
    if stated is not None and stated.type is StrategyType.RECREATE:
        yield Problem((*at, "strategy", "type"), f"{IN_PLACE}, one batch after another: say RollingUpdate")
    elif not is_nothing(_rolling_update(component)["maxSurge"]):
        yield Problem((*at, "strategy", "rollingUpdate", "maxSurge"), f"{IN_PLACE}: leave it out")
    if component.min_ready_seconds == 0:
        yield Problem((*at, "minReadySeconds"), "under spec.upgrade it must be at least 1")


def workload(
    deployment: DynamoGraphDeployment, component: ComponentSpec, template: Manifest, annotations: Manifest
) -> Manifest:
    """Return the Deployment of a component, with the hash of its template among its annotations.

    Without replicas in the component it states none: the client that scales it sets the number.
    """
    annotations = {TEMPLATE_HASH: template_hash(template), **annotations}
    stated: Manifest = {} if component.replicas is None else {"replicas": component.replicas}
    ready_s = min_ready_s(deployment, component)
    if ready_s is not None:
        stated["minReadySeconds"] = ready_s
    if component.progress_deadline_seconds is not None:
        stated["progressDeadlineSeconds"] = component.progress_deadline_seconds
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": component_metadata(deployment, component, annotations),
        "spec": {
            **stated,
            "selector": {"matchLabels": strings(selector(deployment.metadata.name, component.name))},
            "strategy": _strategy(component),
            "template": template,
        },
    }


def _strategy(component: ComponentSpec) -> Manifest:
    stated = component.strategy
    if stated is not None and stated.type is StrategyType.RECREATE:
        return {"type": stated.type.value}
    return {"type": StrategyType.ROLLING_UPDATE.value, "rollingUpdate": {**_rolling_update(component)}}


def _rolling_update(component: ComponentSpec) -> dict[str, int | str]:
    """Return how many pods are replaced at a time, from the component or by its type: a new frontend starts
    before the old one ends; an engine ends first, since the next one needs its accelerator.
    """
    stated = None if component.strategy is None else component.strategy.rolling_update
    surge, unavailable = (None, None) if stated is None else (stated.max_surge, stated.max_unavailable)
    is_frontend = component.type is ComponentType.FRONTEND
    return {
        "maxSurge": (1 if is_frontend else 0) if surge is None else surge,
        "maxUnavailable": (0 if is_frontend else "25%") if unavailable is None else unavailable,
    }


def service(deployment: DynamoGraphDeployment, component: ComponentSpec, port: int) -> Manifest:
    """Return the Service of a frontend on ``port``."""
    stated = component.service or FrontendService()
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": component_metadata(deployment, component, strings(stated.annotations)),
        "spec": {
            "type": stated.type.value,
            "selector": strings(selector(deployment.metadata.name, component.name)),
            "ports": [{"name": "http", "port": port, "targetPort": port, "protocol": "TCP"}],
        },
    }

"""ServiceAccounts, Roles and RoleBindings of processes that register in Kubernetes."""

from enum import StrEnum

from pydantic import JsonValue

from kvrouter.operator.api.deployment import ComponentType, DynamoGraphDeployment
from kvrouter.operator.plan.defaults import PlanDefaults
from kvrouter.operator.plan.manifest import Manifest, labels_of, object_name
from kvrouter.operator.plan.pod_template import PodDraft
from kvrouter.operator.plan.workload import owned_metadata
from kvrouter.settings.planes import DiscoveryBackend
from kvrouter.settings.problems import Problem

CARDS_GROUP = "kvrouter.dev"
CARDS = "kvrouterworkers"
CORDONS = "kvroutercordons"
RBAC_GROUP = "rbac.authorization.k8s.io"
RBAC_VERSION = f"{RBAC_GROUP}/v1"


class Process(StrEnum):
    """Kinds of processes with different rights on worker cards; the name of an account ends in its kind."""

    FRONTENDS = "frontends"
    WORKERS = "workers"


VERBS: dict[Process, tuple[str, ...]] = {
    Process.FRONTENDS: ("list", "watch", "delete"),
    Process.WORKERS: ("get", "create", "update"),
}


CORDON_VERBS: dict[Process, tuple[str, ...]] = {Process.FRONTENDS: ("list", "create", "patch", "delete")}
"""Verbs on cordons; workers do not use them."""


def process_of(kind: ComponentType) -> Process:
    """Return the kind of process that a component's pods run."""
    return Process.FRONTENDS if kind is ComponentType.FRONTEND else Process.WORKERS


def accounts(deployment: DynamoGraphDeployment, defaults: PlanDefaults) -> list[Manifest]:
    """Return a ServiceAccount, a Role and a RoleBinding for each kind of process deployed; an empty list
    without discovery by Kubernetes.
    """
    if defaults.discovery is not DiscoveryBackend.KUBERNETES:
        return []
    there = {process_of(component.type) for component in deployment.spec.components}
    return [manifest for process in Process if process in there for manifest in _account(deployment, process)]


def give_account(
    draft: PodDraft, deployment: DynamoGraphDeployment, kind: ComponentType, defaults: PlanDefaults
) -> None:
    """Give a pod a ServiceAccount if its processes use the API server, and else no token.

    An account that the user names stays: it may have other rights that the pod needs.
    """
    own = draft.spec.get("serviceAccountName") or draft.spec.get("serviceAccount")
    at = (*draft.at, "spec")
    if defaults.discovery is not DiscoveryBackend.KUBERNETES:
        if not own:
            draft.spec.setdefault("automountServiceAccountToken", False)
        return
    name = _name(deployment, process_of(kind))
    if own:
        subject = f"{deployment.metadata.namespace or 'default'}:{own}"
        draft.warnings.append(
            Problem(
                (*at, "serviceAccountName"),
                f"is your own account, which needs what the Role {name} allows: kubectl create rolebinding "
                f"{own}-{name} --role={name} --serviceaccount={subject} "
                f"--namespace={deployment.metadata.namespace or 'default'}",
            )
        )
    else:
        draft.spec["serviceAccountName"] = name
    if draft.spec.get("automountServiceAccountToken") is False:
        must = (
            "must not be false where workers are announced in Kubernetes: without a token nobody finds them"
        )
        draft.warnings.append(Problem((*at, "automountServiceAccountToken"), must))


def _name(deployment: DynamoGraphDeployment, process: Process) -> str:
    return object_name(deployment.metadata.name, process.value)


def _account(deployment: DynamoGraphDeployment, process: Process) -> list[Manifest]:
    name = _name(deployment, process)
    metadata = owned_metadata(deployment, name, labels_of(deployment))
    rules: list[JsonValue] = [{"apiGroups": [CARDS_GROUP], "resources": [CARDS], "verbs": [*VERBS[process]]}]
    if process in CORDON_VERBS:
        verbs: list[JsonValue] = [*CORDON_VERBS[process]]
        rules.append({"apiGroups": [CARDS_GROUP], "resources": [CORDONS], "verbs": verbs})
    subject: JsonValue = {"kind": "ServiceAccount", "name": name}
    if deployment.metadata.namespace:
        subject = {"kind": "ServiceAccount", "name": name, "namespace": deployment.metadata.namespace}
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata},
        {"apiVersion": RBAC_VERSION, "kind": "Role", "metadata": metadata, "rules": rules},
        {
            "apiVersion": RBAC_VERSION,
            "kind": "RoleBinding",
            "metadata": metadata,
            "roleRef": {"apiGroup": RBAC_GROUP, "kind": "Role", "name": name},
            "subjects": [subject],
        },
    ]

"""PodDisruptionBudgets: how many pods a drain may take, for each component or zone."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from math import ceil
from typing import NamedTuple

from kvrouter.kube.objects import annotations_of, key_of
from kvrouter.operator.api.deployment import ComponentSpec, DynamoGraphDeployment
from kvrouter.operator.plan.manifest import Manifest, labels_of, mapping, object_name, selector, strings
from kvrouter.operator.plan.workload import component_metadata, owned_metadata
from kvrouter.settings.problems import Problem

SHARE = 0.25
"""The share of the pods, as in a rolling update of workers; at least one pod."""

BUDGETS = "kvrouter.dev/disruption-budgets"
"""Annotation of a deployment: ``none`` if its pods have other budgets, or shall have none."""
NO_BUDGETS = "none"

WORKERS = "kvrouter.dev/workers"
"""Annotation of a zone's budget: how many Ready workers it was made for."""
FEWER_SINCE = "kvrouter.dev/fewer-since"
"""Annotation of a zone's budget: the time since when it has fewer workers."""

COUNT_DIGITS_MAX = 6

_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_TIME = "%Y-%m-%dT%H:%M:%SZ"


class HeldBudget(NamedTuple):
    """How many Ready workers a zone's budget is made for, and since when there are fewer; None if not."""

    workers: int
    fewer_since: datetime | None = None

    @property
    def at_least(self) -> int:
        """How many workers a drain leaves: all but a quarter, and 0 of a single one."""
        return self.workers - ceil(self.workers * SHARE)


def has_budgets(deployment: DynamoGraphDeployment) -> bool:
    """Return whether the operator writes budgets for a deployment's pods."""
    return deployment.metadata.annotations.get(BUDGETS) != NO_BUDGETS


def budget_warnings(deployment: DynamoGraphDeployment) -> list[Problem]:
    """Return a warning for a value of the annotation that has no meaning."""
    stated = deployment.metadata.annotations.get(BUDGETS, NO_BUDGETS)
    must = f"must be {NO_BUDGETS} or be left out, not {stated!r}: budgets are written"
    return [] if stated == NO_BUDGETS else [Problem(("metadata", "annotations", BUDGETS), must)]


def held_for(before: HeldBudget, ready: int, now: datetime, hold_s: float) -> HeldBudget:
    """Return a zone's budget for ``ready`` workers. More workers count at once, fewer only after ``hold_s``:
    a drain does not lower the budget that limits it, and is not held up for ever.
    """
    if ready >= before.workers:
        return HeldBudget(ready)
    since = before.fewer_since or now
    return (
        HeldBudget(ready) if now - since >= timedelta(seconds=hold_s) else HeldBudget(before.workers, since)
    )


def component_budget(deployment: DynamoGraphDeployment, component: ComponentSpec) -> Manifest:
    """Return the budget of all pods of a component. A share of one pod is that pod: it can be drained."""
    picks = selector(deployment.metadata.name, component.name)
    return _budget(component_metadata(deployment, component), {"maxUnavailable": f"{SHARE:.0%}"}, picks)


def zone_budgets(
    deployment: DynamoGraphDeployment,
    component: ComponentSpec,
    label: str,
    ready: Mapping[str, int],
    current: Sequence[Manifest],
    now: datetime,
    hold_s: float,
) -> list[Manifest]:
    """Return a budget for each zone of a component's workers: ``ready`` counts the Ready ones by the value of
    their ``label``, ``current`` are the deployment's budgets. A zone that lost workers keeps its budget for
    ``hold_s``.

    A budget states how many workers must stay: ``maxUnavailable`` would be counted over the whole component.
    """
    before = {key_of(each).name: _read(each) for each in current}
    picks = selector(deployment.metadata.name, component.name)
    known = {
        str(value)
        for each in current
        if strings(picks).items() <= (labels := _match_labels(each)).items()
        and (value := labels.get(label)) is not None
    }
    found = []
    for value in sorted({*ready, *known}):
        name = budget_name(deployment.metadata.name, component.name, value)
        held = held_for(before.get(name, HeldBudget(0)), ready.get(value, 0), now, hold_s)
        if held.workers:
            annotations: Manifest = {WORKERS: str(held.workers)}
            if held.fewer_since is not None:
                annotations[FEWER_SINCE] = held.fewer_since.astimezone(UTC).strftime(_TIME)
            metadata = owned_metadata(deployment, name, labels_of(deployment, component), annotations)
            found.append(_budget(metadata, {"minAvailable": held.at_least}, {**picks, label: value}))
    return found


def hold_ends_s(budgets: Sequence[Manifest], now: datetime, hold_s: float) -> float | None:
    """Return in how many seconds the first held budget comes down; None if no budget is held."""
    since = [held.fewer_since for held in map(_read, budgets) if held.fewer_since is not None]
    return max(hold_s - (now - min(since)).total_seconds(), 0.0) if since else None


def budget_name(deployment: str, component: str, value: str) -> str:
    """Return the name of a zone's budget: ``<deployment>-<component>.<zone>``. It is no component's name."""
    if _NAME.fullmatch(value):
        return f"{object_name(deployment, component)}.{value}"
    digest = hashlib.sha256(value.encode()).hexdigest()[:8]
    return f"{object_name(deployment, component)}.zone.{digest}"


def _budget(metadata: Manifest, allowed: Manifest, picks: Mapping[str, str]) -> Manifest:
    """Return a budget. Pods that are not Ready serve no requests and may always go: they block no drain."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata,
        "spec": {
            **allowed,
            "selector": {"matchLabels": strings(picks)},
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }


def _match_labels(budget: Manifest) -> Manifest:
    return mapping(mapping(mapping(budget.get("spec")).get("selector")).get("matchLabels"))


def _read(budget: Manifest) -> HeldBudget:
    """Return the counts that a budget was made for; 0 workers if its annotations do not state them."""
    annotations = annotations_of(budget)
    workers, since = str(annotations.get(WORKERS)), annotations.get(FEWER_SINCE)
    if not (workers.isascii() and workers.isdigit() and len(workers) <= COUNT_DIGITS_MAX):
        return HeldBudget(0)
    try:
        fewer_since = datetime.strptime(str(since), _TIME).replace(tzinfo=UTC) if since else None
    except ValueError:
        fewer_since = None
    return HeldBudget(int(workers), fewer_since)

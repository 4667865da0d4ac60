"""How many workers a drain may take: never a zone's last while more are Ready, and never held up for ever."""

from datetime import UTC, datetime, timedelta
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.operator.plan.budgets import (
    BUDGETS,
    HeldBudget,
    budget_name,
    has_budgets,
    held_for,
    zone_budgets,
)
from kvrouter.operator.plan.manifest import Manifest
from kvrouter.operator.plan.plan import plan
from tests.testing.deployment_statuses import REQUIRED
from tests.testing.planned_deployments import DEFAULTS, FACTS, deployment

NOW = datetime(2026, 1, 1, tzinfo=UTC)
HOLD_S = DEFAULTS.disruption_hold_s
LABEL = "topology.kubernetes.io/zone"
OF = deployment(types=("frontend", "prefill", "decode"))
DECODE = OF.spec.components[2]

steps = st.lists(st.tuples(st.integers(0, 20), st.integers(1, 3 * HOLD_S)), min_size=1, max_size=30)


@given(steps)
def test_held_budget_lets_one_worker_go_keeps_one_and_ends_after_the_hold(
    seen: list[tuple[int, int]],
) -> None:
    held, now = HeldBudget(0), NOW
    fewer_for_s = 0
    for ready, later_s in seen:
        now += timedelta(seconds=later_s)
        was, held = held, held_for(held, ready, now, HOLD_S)
        assert held.workers >= ready
        assert held.at_least < held.workers or held.workers == 0  # one may always go
        assert held.at_least >= 1 or held.workers <= 1
        fewer_for_s = fewer_for_s + later_s if was.fewer_since is not None and ready < was.workers else 0
        if fewer_for_s >= HOLD_S:
            assert held == HeldBudget(ready)


def test_budget_lets_a_single_worker_go_and_keeps_some_of_several() -> None:
    left = [HeldBudget(workers).at_least for workers in (0, 1, 2, 3, 4, 5, 8)]
    assert left == [0, 0, 1, 2, 3, 3, 6]


def test_zone_budget_outlives_its_workers_for_the_hold_and_then_goes() -> None:
    found = zone_budgets(OF, DECODE, LABEL, {"a": 2, "b": 1}, [], NOW, HOLD_S)
    assert [at_least(each) for each in found] == [1, 0]
    assert [cast(Manifest, each["metadata"])["name"] for each in found] == ["llm-decode.a", "llm-decode.b"]
    spec = cast(Manifest, found[0]["spec"])
    assert spec["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    picked = cast(Manifest, cast(Manifest, spec["selector"])["matchLabels"])
    assert picked[LABEL] == "a"

    drained = zone_budgets(OF, DECODE, LABEL, {"a": 1}, found, NOW + timedelta(seconds=60), HOLD_S)
    assert [at_least(each) for each in drained] == [1, 0]
    later = NOW + timedelta(seconds=60 + HOLD_S)
    assert [at_least(each) for each in zone_budgets(OF, DECODE, LABEL, {"a": 1}, drained, later, HOLD_S)] == [
        0
    ]


def test_budgets_of_another_component_are_ignored() -> None:
    prefill = zone_budgets(OF, OF.spec.components[1], LABEL, {"a": 2}, [], NOW, HOLD_S)
    assert zone_budgets(OF, DECODE, LABEL, {}, prefill, NOW, HOLD_S) == []


def test_zone_budget_names_are_distinct_for_odd_zone_values() -> None:
    assert budget_name("llm", "decode", "zone-a") == "llm-decode.zone-a"
    odd = {budget_name("llm", "decode", value) for value in ("Zone_A", "zone_a", "")}
    assert len(odd) == 3
    assert all(name.startswith("llm-decode.zone.") for name in odd)


def test_plain_budgets_cover_every_component_or_only_frontends_with_a_policy() -> None:
    for policy, expected in ((None, ["frontend", "prefill", "decode"]), (REQUIRED, ["frontend"])):
        planned = plan(deployment(policy=policy, types=("frontend", "prefill", "decode")), FACTS, DEFAULTS)
        budgets = [each for each in planned.manifests if each["kind"] == "PodDisruptionBudget"]
        names = [cast(Manifest, each["metadata"])["name"] for each in budgets]
        assert [str(name).casefold() for name in names] == [f"llm-{name}" for name in expected]
        assert {cast(Manifest, each["spec"])["maxUnavailable"] for each in budgets} == {"25%"}


@given(st.floats(0.0, 1e6), st.floats(0.0, 1e6))
def test_held_budget_keeps_its_worker_count_until_the_hold_is_over(hold_s: float, later_s: float) -> None:
    held = held_for(HeldBudget(4), 1, NOW, hold_s)
    assert held_for(held, 1, NOW + timedelta(seconds=later_s), hold_s).workers == (
        1 if timedelta(seconds=later_s) >= timedelta(seconds=hold_s) else 4
    )


@pytest.mark.parametrize(
    ("stated", "are_there", "warnings"), [(None, True, 0), ("none", False, 0), ("off", True, 1)]
)
def test_annotation_turns_disruption_budgets_off_and_an_unknown_value_warns(
    stated: str | None, *, are_there: bool, warnings: int
) -> None:
    of = deployment(types=("frontend", "worker"))
    annotations = {} if stated is None else {BUDGETS: stated}
    of = of.model_copy(update={"metadata": of.metadata.model_copy(update={"annotations": annotations})})
    found = plan(of, FACTS, DEFAULTS)
    kinds = [each["kind"] for each in found.manifests]
    assert ("PodDisruptionBudget" in kinds, has_budgets(of)) == (are_there, are_there)
    assert len(found.warnings) == warnings


def at_least(budget: Manifest) -> object:
    return cast(Manifest, budget["spec"])["minAvailable"]

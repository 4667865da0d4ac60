"""Whether requests are served, and why not: the findings, their events, and the workers that they go by."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from kvrouter.core.workers import Role
from kvrouter.kernel.topology.policy import Fallback, Required
from kvrouter.kube.objects import FLEET_LABEL, Key, Manifest
from kvrouter.operator.api.status import ConditionStatus
from kvrouter.operator.labels.pods import Pod
from kvrouter.operator.plan.containers import registers_elsewhere
from kvrouter.operator.reconcile.cards import Cards, fleet_of
from kvrouter.operator.status.available import Registered, Workers, role_mistakes
from kvrouter.operator.status.finding import events_of
from kvrouter.operator.status.resolved import RefusedObjects
from tests.testing import deployment_statuses
from tests.testing.constants import SetConstants
from tests.testing.deployment_statuses import (
    FALSE,
    FRONTEND,
    TRUE,
    UNKNOWN,
    condition,
    pods,
    status,
    status_and_reason,
    worker,
)
from tests.testing.planned_deployments import deployment

FLEET = Key("team", "team_llm")
REQUIRED = Required("zone")
A, B = {"zone": "a"}, {"zone": "b"}
PREFILL = Registered("llama", Role.PREFILL, domains=A, policy=REQUIRED)
DECODE = Registered("llama", Role.DECODE, domains=A)


@pytest.mark.parametrize(
    ("workers", "reported"),
    [
        ([PREFILL, DECODE], (TRUE, "RequestsServed")),
        ([DECODE], (TRUE, "RequestsServed")),
        ([replace(PREFILL, takes_requests=False), DECODE], (TRUE, "RequestsServed")),
        ([], (FALSE, "NoWorkers")),
        ([PREFILL], (FALSE, "NoDecodeWorkers")),
        ([PREFILL, replace(DECODE, domains=B)], (FALSE, "NoPairInDomain")),
        ([replace(PREFILL, policy=None), replace(DECODE, domains=B)], (FALSE, "NoPairInDomain")),
        ([replace(PREFILL, policy=Fallback("zone")), replace(DECODE, domains=B)], (TRUE, "RequestsServed")),
        ([PREFILL, replace(DECODE, takes_requests=False)], (FALSE, "WorkersLeaving")),
        ([PREFILL, DECODE, replace(PREFILL, model="other")], (FALSE, "NoDecodeWorkers")),
    ],
)
def test_available_follows_from_the_registered_workers(
    workers: Sequence[Registered], reported: tuple[ConditionStatus, str]
) -> None:
    assert status_and_reason(status(pods(a=(1, 1)), workers=Workers(workers)), "Available") == reported


def test_available_names_the_models_that_are_not_served() -> None:
    workers = Workers([PREFILL, DECODE, replace(PREFILL, model="other")])
    message = condition(status(pods(a=(1, 1)), workers=workers), "Available").message
    assert message.startswith("requests for other get 503: 1 prefill workers are registered")
    assert message.endswith("llama are served")


NATS = Workers(unknown_because="they announce themselves in NATS")


@pytest.mark.parametrize(
    ("types", "replicas", "workers", "reported"),
    [
        (("prefill", "decode"), 1, Workers([PREFILL, DECODE]), (FALSE, "NoFrontend")),
        (("frontend", "worker"), 0, Workers([PREFILL, DECODE]), (FALSE, "ScaledToZero")),
        (("frontend", "worker"), 1, NATS, (UNKNOWN, "WorkersUnknown")),
        (("frontend", "prefill"), 1, NATS, (FALSE, "NoDecodeWorkers")),
        (("frontend",), 1, NATS, (FALSE, "ScaledToZero")),
    ],
)
def test_available_is_decided_from_the_spec_where_cards_are_not_needed(
    types: tuple[str, ...], replicas: int, workers: Workers, reported: tuple[ConditionStatus, str]
) -> None:
    of = deployment(types=types)
    components = [each.model_copy(update={"replicas": replicas}) for each in of.spec.components]
    of = of.model_copy(update={"spec": of.spec.model_copy(update={"components": tuple(components)})})
    assert status_and_reason(status([], of=of, policy=None, workers=workers), "Available") == reported


def test_available_is_false_without_a_ready_frontend(set_constants: SetConstants) -> None:
    set_constants(deployment_statuses, FRONTEND=replace(FRONTEND, is_ready=False))
    assert status_and_reason(status(pods(a=(1, 1))), "Available") == (FALSE, "NoReadyFrontend")


def test_unavailability_is_no_event_during_a_start_and_is_one_afterwards() -> None:
    alone = Workers([PREFILL])
    starting = status(pods(a=(1, 0)), refusals=RefusedObjects(writes=["x"]), workers=alone)
    assert "NoDecodeWorkers" not in [event.reason for event in events_of(None, starting)]
    ready = status(pods(a=(1, 0)), previous=starting, workers=alone)
    assert [event.reason for event in events_of(starting, ready)][1:] == ["NoDecodeWorkers"]
    assert events_of(ready, status(pods(a=(1, 0)), previous=ready, workers=alone)) == ()
    serving = status(pods(a=(1, 1)), previous=ready, workers=Workers([PREFILL, DECODE]))
    assert "RequestsServed" in [event.reason for event in events_of(ready, serving)]
    broken = status(pods(a=(1, 1)), previous=serving, refusals=RefusedObjects(writes=["x"]), workers=alone)
    assert "NoDecodeWorkers" in [event.reason for event in events_of(serving, broken)]


def test_worker_role_that_differs_from_its_component_type_is_reported() -> None:
    of_decode = worker("decode", "a")
    pod = replace(of_decode, labels={**of_decode.labels, "kvrouter.dev/component": "engines"})
    wrong = Workers([replace(PREFILL, pod=pod.name), replace(DECODE, pod="stranger")])
    (line,) = role_mistakes([pod], wrong)
    assert line == (
        "component engines is of type decode, and its workers register as prefill: start them with --role "
        "decode, or move them to a component of their own type"
    )
    assert role_mistakes([pod], Workers([replace(DECODE, pod=pod.name)])) == []
    assert role_mistakes([Pod("x")], wrong) == []
    assert line in condition(status([pod], workers=wrong), "Available").message


@pytest.mark.parametrize(
    ("main", "reported"),
    [
        ({}, None),
        ({"env": [{"name": "DYN_NAMESPACE", "value": "x"}]}, "frontend says DYN_NAMESPACE itself"),
        ({"args": ["frontend", "--discovery=nats"]}, "frontend says --discovery itself"),
    ],
)
def test_frontend_with_its_own_namespace_or_discovery_is_recognized(
    main: Manifest, reported: str | None
) -> None:
    of = deployment(pods={"frontend": {"spec": {"containers": [{"name": "main", **main}]}}})
    assert registers_elsewhere(of.spec) == reported


# Cards and leases.


def card(number: int = 1, version: str = "1", *, lease_s: float = 10.0, **said: object) -> Manifest:
    spec: Manifest = {"card": {"model": "llama", "role": "decode", **said}, "lease_s": lease_s}  # type: ignore[dict-item]
    return {
        "metadata": {
            "namespace": "team",
            "name": f"team.llm-{number}",
            "resourceVersion": version,
            "labels": {FLEET_LABEL: FLEET.name},
            "ownerReferences": [{"kind": "Pod", "name": f"pod-{number}", "uid": "u"}],
        },
        "spec": spec,
    }


def cards() -> tuple[Cards, list[Key], Callable[[], list[str]]]:
    heard = list[Key]()
    found = Cards(heard.append)
    return found, heard, lambda: [each.pod for each in found.of(FLEET, has_pod="pod-2".__eq__)]


def test_card_renewal_is_no_change_and_an_unrenewed_lease_expires() -> None:
    found, heard, there = cards()
    found.update(card(), 0.0, is_there=True)
    found.update(card(version="2"), 8.0, is_there=True)
    found.update(card(version="2"), 12.0, is_there=True)
    assert heard == [FLEET] == [fleet_of(card())]
    found.expire(17.0)
    assert there() == ["pod-1"]
    found.expire(18.0)
    assert (there(), heard) == ([], [FLEET] * 2)
    found.update(card(version="3"), 19.0, is_there=True)
    assert (there(), heard) == (["pod-1"], [FLEET] * 3)


def test_a_worker_has_the_id_of_its_card_and_the_name_of_its_pod() -> None:
    found, _, _ = cards()
    found.update(card(worker_id=2**63), 0.0, is_there=True)
    (worker,) = found.of(FLEET, has_pod=bool)
    assert (worker.worker_id, worker.pod) == (2**63, "pod-1")


def test_no_lease_expires_while_the_watch_is_lost_and_each_restarts_after() -> None:
    found, _, there = cards()
    found.update(card(), 0.0, is_there=True)
    found.watch_lost("no")
    found.expire(1000.0)
    assert there() == ["pod-1"]
    found.watch_restored(1000.0)
    found.expire(1009.0)
    assert there() == ["pod-1"]
    found.expire(1010.0)
    assert there() == []


def test_worker_of_a_deleted_card_stays_until_expiry_while_its_pod_exists() -> None:
    found, _, there = cards()
    for number in (1, 2):
        found.update(card(number), 0.0, is_there=True)
        found.update(card(number), 1.0, is_there=False)
    assert there() == ["pod-2"]
    found.expire(10.0)
    assert there() == []


def test_draining_silent_invalid_and_withdrawn_cards_change_the_workers() -> None:
    found, heard, there = cards()
    found.update(card(), 0.0, is_there=True)
    for version, state in (("2", "draining"), ("3", "engine_silent")):
        found.update(card(version=version, **{state: True}), 1.0, is_there=True)
        assert [each.takes_requests for each in found.of(FLEET, has_pod=bool)] == [False]
    found.update(card(version="4", role="cook"), 2.0, is_there=True)
    assert there() == []
    found.update(card(version="5"), 3.0, is_there=True)
    gone = card(version="6")
    gone["spec"] = {**gone["spec"], "withdrawn": True}  # type: ignore[dict-item]
    found.update(gone, 4.0, is_there=True)
    assert there() == []
    assert len(heard) == 5

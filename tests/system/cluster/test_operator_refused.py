"""What the API server refuses of a deployment is reported in its status, in its words, and tried again."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import pytest

from kvrouter.operator.api.deployment import PLURAL
from tests.system.cluster.control_plane import ControlPlane, KubectlError
from tests.system.cluster.nodes import ZONE
from tests.system.cluster.operators import WAIT, events, graph, install_crds, operator, reasons, wait_for
from tests.system.cluster.refusals import DENIED, MISTAKES, denying, engine_policy, with_main
from tests.system.cluster.webhooks import until_reported
from tests.testing.processes import eventually


@pytest.fixture(autouse=True)
def crds(plane: ControlPlane) -> None:
    install_crds(plane)


async def test_pod_template_refusals_are_in_the_status_until_fixed(
    plane: ControlPlane, namespace: str
) -> None:
    good = graph(namespace, "llm")
    async with operator(plane, namespace, "one"):
        plane.apply(good)
        wait_for(plane, namespace, "Ready=True")
        for mistake, words in MISTAKES.values():
            write(plane, with_main(good, mistake))
            await until_refused(plane, namespace, "Deployment llm-decode", words)
        labelled = deepcopy(good)
        labelled["spec"]["components"][2]["podTemplate"]["metadata"] = {"labels": {"team": "a b"}}
        write(plane, labelled)
        await until_refused(plane, namespace, "Deployment llm-decode", 'Invalid value: "a b"')
        write(plane, good)
        wait_for(plane, namespace, "Ready=True")


async def test_a_refused_object_blocks_no_other_and_removes_nothing(
    plane: ControlPlane, namespace: str
) -> None:
    spec = graph(namespace, "llm")
    async with operator(plane, namespace, "one"):
        plane.apply(spec)
        wait_for(plane, namespace, "Ready=True")
        first, second, third = spec["spec"]["components"]
        renamed = with_main({**spec, "spec": {"components": [first, second, {**third, "name": "new"}]}}, {})
        renamed["spec"]["components"][1]["replicas"] = 2
        mistake, words = MISTAKES["a quantity"]
        write(plane, with_main(renamed, mistake))
        await until_refused(plane, namespace, "Deployment llm-new", words)
        there = {
            each["metadata"]["name"]: each["spec"]["replicas"]
            for each in plane.read("deployments", "--namespace", namespace)["items"]
        }
        assert there == {"llm-frontend": 1, "llm-prefill": 2, "llm-decode": 3}
        write(plane, renamed)
        plane.kubectl("wait", "--for=delete", "deployment/llm-decode", "--namespace", namespace, WAIT)


async def test_quota_and_policy_refusals_are_reported_and_retried(
    plane: ControlPlane, namespace: str
) -> None:
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"namespace": namespace, "name": "few"}}
    plane.apply({**quota, "spec": {"hard": {"count/services": "0"}}})

    async def is_counted() -> bool:
        return "used" in plane.read("resourcequota", "few", "--namespace", namespace).get("status", {})

    await eventually(is_counted)
    with denied(plane, engine_policy(namespace)):
        async with operator(plane, namespace, "one"):
            plane.apply(graph(namespace, "llm"))
            await until_refused(plane, namespace, "Service llm-frontend", "exceeded quota: few")
            write(plane, with_main(graph(namespace, "llm"), {"image": "example.com/denied:1"}))
            await until_refused(plane, namespace, "Deployment llm-decode", DENIED)
            write(plane, graph(namespace, "llm"))
            plane.kubectl("delete", "resourcequota", "few", "--namespace", namespace)
            wait_for(plane, namespace, "Ready=True")


async def test_a_refused_status_write_is_one_event(plane: ControlPlane, namespace: str) -> None:
    here = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}}
    rule = denying(f"s-{namespace}", "nvidia.com", "v1beta1", f"{PLURAL}/status", "false", **here)
    nobodys = graph(namespace, "nobodys")
    nobodys["metadata"]["annotations"] = {"kvrouter.dev/class": "none"}
    plane.apply(nobodys)
    patch = ("--type=merge", "--patch", '{"status": {"balance": "x"}}')
    of_nobody = ("patch", "dgd", "nobodys", "--namespace", namespace, "--subresource=status", *patch)
    async with operator(plane, namespace, "one") as replica:
        with denied(plane, rule):
            await in_force(plane, *of_nobody)
            plane.apply(graph(namespace, "llm"))
            await until_event(plane, namespace, "StatusRefused", DENIED)
            assert len([each for each in events(plane, namespace) if each["reason"] == "StatusRefused"]) == 1
            await until_reported(replica, DENIED)
        wait_for(plane, namespace, "Ready=True")


async def test_a_refused_binding_policy_is_an_event_on_its_deployment(
    plane: ControlPlane, namespace: str
) -> None:
    mine = f"!has(object.spec.workers) || !('{namespace}' in object.spec.workers)"
    rule = denying(f"b-{namespace}", "kvrouter.dev", "v1alpha1", "kvrouternodeplaces", mine)
    places = {
        "apiVersion": "kvrouter.dev/v1alpha1",
        "kind": "KvrouterNodePlaces",
        "metadata": {"name": f"tried-{namespace}"},
        "spec": {"levels": [], "workers": {namespace: []}, "values": {}},
    }
    with denied(plane, rule):
        await in_force(plane, "create", "--filename", "-", stdin=json.dumps(places))
        async with operator(plane, namespace, "one"):
            plane.apply(graph(namespace, "plain"), graph(namespace, "llm", labelKey=ZONE, domain="zone"))
            await until_event(plane, namespace, "BindingPolicyRefused", DENIED)
            wait_for(plane, namespace, "Ready=True")
            reported = [each for each in events(plane, namespace) if each["reason"] == "BindingPolicyRefused"]
            assert {each["involvedObject"]["name"] for each in reported} == {"llm"}


async def test_pods_forbidden_by_a_quota_are_reported(plane: ControlPlane, namespace: str) -> None:
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"namespace": namespace, "name": "few"}}
    plane.apply({**quota, "spec": {"hard": {"pods": "4"}}})
    async with operator(plane, namespace, "one"):
        plane.apply(graph(namespace, "llm"))

        async def is_reported() -> bool:
            reported = ready(plane, namespace)
            is_so = reported.get("reason") == "PodsRefused" and "exceeded quota: few" in reported["message"]
            return is_so and "PodsRefused" in reasons(plane, namespace)

        await eventually(is_reported)
        plane.kubectl("delete", "resourcequota", "few", "--namespace", namespace)
        plane.kubectl(
            "rollout", "restart", "deployment/llm-decode", "deployment/llm-prefill", "-n", namespace
        )
        wait_for(plane, namespace, "Ready=True")


async def until_refused(plane: ControlPlane, namespace: str, what: str, words: str) -> None:
    """Return once the status of the latest generation, and an event, tell that this was refused."""

    async def is_reported() -> bool:
        found = plane.read("dgd", "llm", "--namespace", namespace)
        if found.get("status", {}).get("observedGeneration") != found["metadata"]["generation"]:
            return False
        reported = ready(plane, namespace)
        is_so = (reported.get("status"), reported.get("reason")) == ("False", "WriteRefused")
        notes = [event["message"] for event in events(plane, namespace) if event["reason"] == "WriteRefused"]
        return is_so and all(
            any(what in text and words in text for text in texts) for texts in ([reported["message"]], notes)
        )

    try:
        await eventually(is_reported)
    except AssertionError as error:
        raise AssertionError(f"{what} {words}: {ready(plane, namespace)}") from error


async def until_event(plane: ControlPlane, namespace: str, reason: str, words: str) -> None:
    """Return once an event of this reason has these words."""

    async def is_there() -> bool:
        found = [each["message"] for each in events(plane, namespace) if each["reason"] == reason]
        return any(words in message for message in found)

    await eventually(is_there)


@contextmanager
def denied(plane: ControlPlane, rule: Sequence[Mapping[str, Any]]) -> Iterator[None]:
    """A policy engine's rule and its binding are there, until the end."""
    name = rule[0]["metadata"]["name"]
    with (
        plane.deleting("validatingadmissionpolicy", name),
        plane.deleting("validatingadmissionpolicybinding", name),
    ):
        plane.apply(*rule)
        yield


async def in_force(plane: ControlPlane, *command: str, stdin: str = "") -> None:
    """Return once the API server refuses what this command would write: it learns of a rule in a moment."""

    async def is_denied() -> bool:
        try:
            plane.kubectl(*command, "--dry-run=server", stdin=stdin)
        except KubectlError as error:
            return DENIED in error.said
        return False

    await eventually(is_denied)


def write(plane: ControlPlane, spec: Mapping[str, Any]) -> None:
    plane.kubectl("replace", "--filename", "-", stdin=json.dumps(spec))


def ready(plane: ControlPlane, namespace: str) -> dict[str, str]:
    conditions = plane.read("dgd", "llm", "--namespace", namespace).get("status", {}).get("conditions", [])
    return next((each for each in conditions if each["type"] == "Ready"), {})

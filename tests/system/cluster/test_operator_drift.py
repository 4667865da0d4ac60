"""What other controllers do to the metadata of a deployment's objects is put right in seconds."""

import asyncio
import json
from typing import Any

import pytest

from kvrouter.operator.reconcile.apply import OWNED
from tests.system.cluster.control_plane import ControlPlane
from tests.system.cluster.nodes import ZONE
from tests.system.cluster.operators import WAIT, graph, install_crds, operator, reasons, wait_for
from tests.testing.processes import eventually

KINDS = {kind.name: f"{kind.plural}.{kind.api_version.rpartition('/')[0]}".rstrip(".") for kind in OWNED}
PUT_RIGHT_WITHIN_S = 120.0
"""Seconds, a fifth of the ten minutes after which everything is applied again in any case."""

FOREIGN: dict[str, Any] = {
    "labels": {"example.com/mark": "one"},
    "annotations": {"example.com/note": "two"},
    "finalizers": ["example.com/hold"],
}


@pytest.fixture(autouse=True)
def crds(plane: ControlPlane) -> None:
    install_crds(plane)


async def test_changed_metadata_is_restored_on_every_kind(plane: ControlPlane, namespace: str) -> None:
    policy = {"labelKey": ZONE, "domain": "zone"}
    options = ("--network-policies", "--discovery", "kubernetes", "--event-plane", "zmq")
    node = plane.read("nodes")["items"][0]["metadata"]["name"]
    async with operator(plane, namespace, "one", *options):
        plane.apply(graph(namespace, "llm", **policy))
        plane.kubectl("annotate", "node", node, "kvrouter.dev/cordon=maintenance")
        try:
            await asyncio.to_thread(wait_for, plane, namespace, "Ready")
            await eventually(lambda: are_all_there(plane, namespace))
            planned = one_of_each_kind(plane, namespace)
            for spoilt in (spoilt_labels, spoilt_annotations, without_owner, of_nobody):
                is_spoilt = {
                    kind: patched(plane, each, patch)
                    for kind, each in planned.items()
                    if (patch := spoilt(each["metadata"])) is not None
                }
                assert is_spoilt, spoilt.__name__
                await eventually(
                    lambda: are_put_right(plane, planned),
                    limit_s=PUT_RIGHT_WITHIN_S,
                )
            assert "NameTaken" not in reasons(plane, namespace)
        finally:
            plane.kubectl("annotate", "node", node, "kvrouter.dev/cordon-")


async def test_foreign_metadata_stays_and_a_finalizer_blocks_only_its_object(
    plane: ControlPlane, namespace: str
) -> None:
    async with operator(plane, namespace, "one"):
        plane.apply(graph(namespace, "llm"))
        await asyncio.to_thread(wait_for, plane, namespace, "Ready")
        before = plane.read("deployment", "llm-decode", "--namespace", namespace)
        held = patched(plane, before, {"metadata": FOREIGN})
        plane.kubectl("delete", "deployment", "llm-decode", "--wait=false", "--namespace", namespace)
        plane.kubectl("scale", "deployment/llm-prefill", "--replicas=1", "--namespace", namespace)

        async def is_set_back() -> bool:
            found = plane.read("deployment", "llm-prefill", "--namespace", namespace)
            return bool(found["spec"]["replicas"] == 3)

        await eventually(is_set_back)
        there = plane.read("deployment", "llm-decode", "--namespace", namespace)["metadata"]
        assert there["deletionTimestamp"]
        assert there["uid"] == held["metadata"]["uid"]
        assert there["finalizers"] == FOREIGN["finalizers"]
        assert there["labels"] == {**before["metadata"]["labels"], **FOREIGN["labels"]}
        assert there["annotations"].items() >= FOREIGN["annotations"].items()
        patched(plane, before, {"metadata": {"finalizers": None}})

        async def is_new() -> bool:
            found = plane.read("deployments", "--namespace", namespace)["items"]
            uids = {each["metadata"]["name"]: each["metadata"]["uid"] for each in found}
            return uids.get("llm-decode") not in {None, held["metadata"]["uid"]}

        await eventually(is_new)
        plane.kubectl("delete", "dgd", "llm", "--namespace", namespace)
        plane.kubectl("wait", "--for=delete", "deployments", "--all", "--namespace", namespace, WAIT)


def owned(plane: ControlPlane, namespace: str) -> list[dict[str, Any]]:
    """What the operator wrote there."""
    listed = plane.read(",".join(KINDS.values()), "--namespace", namespace)["items"]
    return [each for each in listed if each["metadata"].get("ownerReferences")]


async def are_all_there(plane: ControlPlane, namespace: str) -> bool:
    return {each["kind"] for each in owned(plane, namespace)} >= KINDS.keys()


def one_of_each_kind(plane: ControlPlane, namespace: str) -> dict[str, dict[str, Any]]:
    return {each["kind"]: each for each in owned(plane, namespace)}


def patched(plane: ControlPlane, each: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """Change an object as another controller does."""
    metadata = each["metadata"]
    place = (KINDS[each["kind"]], metadata["name"], "--namespace", metadata["namespace"])
    written = ("--type=merge", "--patch", json.dumps(patch), "--field-manager=somebody", "--output=json")
    found: dict[str, Any] = json.loads(plane.kubectl("patch", *place, *written))
    return found


async def are_put_right(plane: ControlPlane, planned: dict[str, dict[str, Any]]) -> bool:
    """Whether each is the same object with all the metadata that it had."""
    (namespace,) = {each["metadata"]["namespace"] for each in planned.values()}
    there = {(each["kind"], each["metadata"]["name"]): each for each in owned(plane, namespace)}
    return all(
        said(there.get((kind, each["metadata"]["name"]), {"metadata": {}})) == said(each)
        for kind, each in planned.items()
    )


def said(each: dict[str, Any]) -> tuple[object, ...]:
    metadata = each["metadata"]
    return tuple(metadata.get(part) for part in ("uid", "labels", "annotations", "ownerReferences"))


def spoilt_labels(metadata: dict[str, Any]) -> dict[str, Any] | None:
    """Every label another one, that of who manages it too."""
    return {"metadata": {"labels": dict.fromkeys(metadata["labels"], "else")}}


def spoilt_annotations(metadata: dict[str, Any]) -> dict[str, Any] | None:
    """Those of the operator gone."""
    ours = [name for name in metadata.get("annotations", {}) if "kvrouter.dev/" in name]
    return {"metadata": {"annotations": dict.fromkeys(ours)}} if ours else None


def without_owner(_metadata: dict[str, Any]) -> dict[str, Any] | None:
    """Nobody's, so that it would outlive its deployment."""
    return {"metadata": {"ownerReferences": None}}


def of_nobody(metadata: dict[str, Any]) -> dict[str, Any] | None:
    """Nobody's, with nothing on it that says whose it was."""
    return {"metadata": {"ownerReferences": None, "labels": dict.fromkeys(metadata["labels"])}}

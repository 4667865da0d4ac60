"""Definitions of an older version are upgraded by kubectl under live objects; nothing is forced unseen."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm_python import Config

from kvrouter.operator.api.crd import DEFINITION
from kvrouter.operator.reconcile.definition import NAMES
from tests.system.cluster.charted import lead, operator_as_deployed, reachable
from tests.system.cluster.control_plane import ControlPlane, KubectlError
from tests.system.cluster.namespaces import new_namespace
from tests.system.cluster.nodes import RACK
from tests.system.cluster.operators import CRDS, FAR_S, WAIT, graph
from tests.system.cluster.preflighted import preflight
from tests.testing.helm_chart import CHART
from tests.testing.processes import eventually

UPGRADE = ("apply", "--server-side", "--kustomize", str(CRDS))
NEW_COLUMNS = ["NAME", "READY", "AVAILABLE", "DOMAIN", "ENFORCEMENT", "PREFILL/DECODE", "AGE"]
NEW = "dgd.spec.components.kvCacheTransferTopology.mismatchPolicy"


@pytest.fixture
def system(own_plane: ControlPlane) -> Iterator[str]:
    """The namespace of the operator, and of a deployment."""
    with new_namespace(own_plane) as name:
        yield name


async def test_upgraded_definitions_keep_objects_and_the_operator_running(
    own_plane: ControlPlane, system: str, tmp_path: Path
) -> None:
    plane = own_plane
    plane.kubectl("apply", "--server-side", "--kustomize", str(older(tmp_path)))
    with Config(kubeconfig_path=plane.admin, namespace=system) as helm:
        await asyncio.to_thread(helm.install, CHART, "kvrouter", reachable(), namespace=system)
    lead(plane, system)
    async with operator_as_deployed(plane, system, "one") as one:
        fleet = graph(system, "llm")
        fleet["spec"]["components"][0]["kvCacheTransferTopology"] = {"level": "rack", "label": RACK}
        await asyncio.to_thread(plane.apply, fleet, card(system))
        await until(plane, system, "Ready=True")
        await until(plane, system, "DomainBalanced=True")
        before = plane.read("dgd", "llm", "--namespace", system)
        reported = plane.read("kvw", "llm-1", "--namespace", system)["spec"]
        assert columns(plane, system) == ["NAME", "READY", "AVAILABLE", "DOMAIN", "PREFILL/DECODE", "AGE"]
        assert 'field "mismatchPolicy" does not exist' in explained(plane)

        plane.kubectl(*UPGRADE)

        async def is_served() -> bool:
            return "ENFORCEMENT" in columns(plane, system) and "fail" in explained(plane)

        await eventually(is_served)
        after = plane.read("dgd", "llm", "--namespace", system)
        assert after["status"] == before["status"]
        assert after["metadata"]["generation"] == before["metadata"]["generation"]
        frontend = after["spec"]["components"][0]["kvCacheTransferTopology"]
        assert frontend.pop("mismatchPolicy") == "fail"  # its default, where nobody could say it before
        assert after["spec"] == before["spec"]
        assert plane.read("kvw", "llm-1", "--namespace", system)["spec"] == reported
        assert columns(plane, system) == NEW_COLUMNS

        fleet["spec"]["components"][2]["replicas"] = 4
        await asyncio.to_thread(plane.apply, fleet)
        await scaled(plane, system, 4)
        assert await one.end() == 0
    # A watch that is open goes on with the old definition for up to two minutes; the next operator's is new.
    async with operator_as_deployed(plane, system, "two"):
        fleet["spec"]["components"][0]["kvCacheTransferTopology"]["mismatchPolicy"] = "fallback"
        await asyncio.to_thread(plane.apply, fleet)
        enforcement = "--for=jsonpath={.status.policy.enforcement}=fallback"
        await asyncio.to_thread(plane.kubectl, "wait", enforcement, "dgd/llm", "--namespace", system, WAIT)


async def test_preflights_command_takes_over_definitions_written_by_helm(
    own_plane: ControlPlane, tmp_path: Path
) -> None:
    plane = own_plane
    plane.kubectl("delete", "crd", "--selector", "app.kubernetes.io/part-of=kvrouter", WAIT)
    old = str(older(tmp_path))
    plane.kubectl("apply", "--server-side", "--field-manager=helm", "--kustomize", old)
    plane.kubectl("annotate", "crd", *NAMES, f"{DEFINITION}-")  # as before there was an annotation
    code, reported = preflight(plane)
    assert (code, reported.count("another project's definition")) == (1, len(NAMES))
    plane.kubectl("annotate", "crd", *NAMES, f"{DEFINITION}=0")
    code, reported = preflight(plane)
    assert code == 1
    assert reported.count("its fields are held by helm") == len(NAMES)
    with pytest.raises(KubectlError, match=r'conflicts? with "helm"'):
        plane.kubectl(*UPGRADE)
    (way_out,) = {line.rpartition("take them over once: kubectl ")[2] for line in reported.splitlines()}
    plane.kubectl(*way_out.replace("deploy/crds", str(CRDS)).split())

    async def is_served() -> bool:
        return "fail" in explained(plane)

    await eventually(is_served)
    assert preflight(plane)[0] == 0
    plane.kubectl(*UPGRADE)


def older(folder: Path) -> Path:
    """The definitions as they might have been: one field less that users write, and one column."""
    for each in CRDS.iterdir():
        (folder / each.name).write_text(each.read_text())
    path = folder / "nvidia.com_dynamographdeployments.yaml"
    definition = yaml.safe_load(path.read_text())
    (version,) = definition["spec"]["versions"]
    version["additionalPrinterColumns"] = [
        column for column in version["additionalPrinterColumns"] if column["name"] != "Enforcement"
    ]
    fields = version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    component = fields["components"]["items"]["properties"]
    del component["kvCacheTransferTopology"]["properties"]["mismatchPolicy"]
    path.write_text(yaml.safe_dump(definition))
    return folder


def card(namespace: str) -> dict[str, Any]:
    """A worker that announced itself."""
    return {
        "apiVersion": "kvrouter.dev/v1alpha1",
        "kind": "KvrouterWorker",
        "metadata": {"namespace": namespace, "name": "llm-1"},
        "spec": {"card": {"model": "mock", "role": "decode"}, "lease_s": FAR_S, "replaced": [1]},
    }


def explained(plane: ControlPlane) -> str:
    """What kubectl says of the field, or why it says nothing."""
    try:
        return plane.kubectl("explain", NEW)
    except KubectlError as error:
        return error.said


def columns(plane: ControlPlane, namespace: str) -> list[str]:
    return plane.kubectl("get", "dgd", "--namespace", namespace).splitlines()[0].split()


async def scaled(plane: ControlPlane, namespace: str, replicas: int) -> None:
    wanted = f"--for=jsonpath={{.spec.replicas}}={replicas}"
    waited = ("wait", wanted, "deployment/llm-decode", "--namespace", namespace, WAIT)
    await asyncio.to_thread(plane.kubectl, *waited)


async def until(plane: ControlPlane, namespace: str, condition: str) -> None:
    waited = ("wait", f"--for=condition={condition}", "dgd/llm", "--namespace", namespace, WAIT)
    await asyncio.to_thread(plane.kubectl, *waited)

"""The chart on a control plane: installed, used, and taken away, by kubectl and by Helm."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from helm_python import Config

from tests.system.cluster.charted import NAME, lead, left_over, operator_as_deployed, reachable, run_job
from tests.system.cluster.control_plane import ControlPlane, KubectlError
from tests.system.cluster.namespaces import new_namespace
from tests.system.cluster.nodes import RACK
from tests.system.cluster.operators import WAIT, graph, install_crds
from tests.testing.helm_chart import CHART, Manifest, is_hook, of_kind, rendered
from tests.testing.processes import eventually

SECRET = "kvrouter-operator-certificate"
UNKNOWN = {"clusterTopologyName": "gpu-fabric", "domain": "zone"}
POLICIES = "mutatingadmissionpolicies,mutatingadmissionpolicybindings,kvrouternodeplaces"


@pytest.fixture
def system(own_plane: ControlPlane) -> Iterator[str]:
    """The namespace of the operator."""
    install_crds(own_plane)
    with new_namespace(own_plane) as name:
        yield name


@pytest.fixture
def fleets(own_plane: ControlPlane) -> Iterator[str]:
    """A namespace with deployments."""
    with new_namespace(own_plane) as name:
        yield name


async def test_the_chart_applied_by_kubectl_serves_all_namespaces_and_is_removed(
    own_plane: ControlPlane, system: str, fleets: str
) -> None:
    plane = own_plane
    before = left_over(plane, system)
    manifests = rendered({**reachable(), "fleets": {"topologyWaitSeconds": 7}}, namespace=system)
    shipped = [each for each in manifests if not is_hook(each)]
    plane.apply(*shipped)
    lead(plane, system)
    async with operator_as_deployed(plane, system, "one") as one:
        await until_leads(plane, system)
        assert plane.read("secret", SECRET, "--namespace", system)["data"]["tls.crt"]
        with pytest.raises(KubectlError, match="this cluster knows no ClusterTopologyBinding") as refused:
            await asyncio.to_thread(plane.apply, graph(fleets, "llm", **UNKNOWN))
        assert "clusterTopologyName" in refused.value.said

        await asyncio.to_thread(plane.apply, graph(fleets, "llm", labelKey=RACK, domain="rack"))
        for condition in ("Ready", "TopologyResolved", "DomainBalanced"):
            await until(plane, fleets, "dgd/llm", condition)
        assert len(plane.read(POLICIES)["items"]) == 3
        template = plane.read("deployment", "llm-decode", "--namespace", fleets)["spec"]["template"]
        (wait,) = template["spec"]["initContainers"]
        (container,) = template["spec"]["containers"]
        operator = of_kind(manifests, "Deployment")[0]["spec"]["template"]["spec"]["containers"][0]
        assert wait["image"] == container["image"] == operator["image"]
        assert "--timeout-s=7" in wait["args"]

        plane.kubectl("delete", "dgd", "llm", "--namespace", fleets)
        for kind in ("deployments", "services"):
            plane.kubectl("wait", "--for=delete", kind, "--all", "--namespace", fleets, WAIT)
        assert "forbidden" not in one.log
        assert await one.end() == 0

    for each in reversed(shipped):
        plane.kubectl("delete", "--filename", "-", stdin=json.dumps(each))
    hooks = [each for each in manifests if is_hook(each) and each["kind"] != "Pod"]
    (job,) = of_kind(hooks, "Job")
    accounts = [each for each in hooks if each is not job]
    plane.apply(*accounts)
    await run_job(plane, system, job)
    for each in reversed(accounts):
        plane.kubectl("delete", "--filename", "-", stdin=json.dumps(each))
    await until_left(plane, system, before)


async def test_spec_writes_fail_without_an_operator_and_clean_up_still_works(
    own_plane: ControlPlane, system: str, fleets: str
) -> None:
    plane = own_plane
    manifests = rendered(reachable(), namespace=system)
    shipped = [each for each in manifests if not is_hook(each)]
    plane.apply(*shipped)
    lead(plane, system)
    async with operator_as_deployed(plane, system, "one"):
        await asyncio.to_thread(plane.apply, graph(fleets, "llm", labelKey=RACK, domain="rack"))
        await until(plane, fleets, "dgd/llm", "DomainBalanced")
        await asyncio.to_thread(plane.apply, graph(fleets, "leaves"))
    with pytest.raises(KubectlError, match="failed calling webhook"):
        plane.apply(graph(fleets, "comes"))
    with pytest.raises(KubectlError, match="failed calling webhook"):
        plane.apply(graph(fleets, "llm"))
    plane.kubectl("label", "dgd/llm", "kept=yes", "--namespace", fleets)
    plane.kubectl("delete", "dgd/leaves", "--cascade=foreground", "--namespace", fleets, WAIT)
    for each in reversed(shipped):
        plane.kubectl("delete", "--filename", "-", stdin=json.dumps(each))
    assert len(plane.read(POLICIES)["items"]) == 3
    plane.apply(*(each for each in manifests if is_hook(each) and each["kind"] not in ("Job", "Pod")))
    (job,) = of_kind(manifests, "Job")
    reported = await run_job(plane, system, job)
    assert reported.startswith("MutatingAdmissionPolicy")
    assert plane.read(POLICIES)["items"] == []
    assert plane.read("deployment", "llm-decode", "--namespace", fleets)["status"]["readyReplicas"] == 3
    for each in manifests:
        if is_hook(each) and each["kind"] not in ("Job", "Pod"):
            plane.kubectl("delete", "--filename", "-", stdin=json.dumps(each))


async def test_namespace_editors_and_viewers_get_rights_on_deployments(
    own_plane: ControlPlane, system: str, fleets: str
) -> None:
    plane = own_plane
    roles = [
        each for each in rendered(namespace=system) if each["metadata"]["name"].endswith(("viewer", "editor"))
    ]
    plane.apply(*roles)
    for user, role in (("ed", "edit"), ("vi", "view")):
        plane.kubectl(
            "create", "rolebinding", user, f"--clusterrole={role}", f"--user={user}", "--namespace", fleets
        )

    def may(user: str, verb: str, what: str, *part: str) -> bool:
        question = ("auth", "can-i", verb, what, *part, "--as", user, "--namespace", fleets)
        try:
            return plane.kubectl(*question).strip() == "yes"
        except KubectlError:  # it ends with 1 for no
            return False

    async def have_reached_the_roles() -> bool:
        return may("ed", "create", "dynamographdeployments.nvidia.com") and may(
            "vi", "list", "kvrouterworkers.kvrouter.dev"
        )

    await eventually(have_reached_the_roles)
    assert not may("vi", "create", "dynamographdeployments.nvidia.com")
    assert not may("ed", "create", "kvrouterworkers.kvrouter.dev")
    assert may("ed", "create", "kvroutercordons.kvrouter.dev")
    assert may("vi", "list", "kvroutercordons.kvrouter.dev")
    assert not may("vi", "create", "kvroutercordons.kvrouter.dev")
    assert not may("ed", "patch", "dynamographdeployments.nvidia.com", "--subresource=status")
    for each in roles:
        plane.kubectl("delete", "--filename", "-", stdin=json.dumps(each))


async def test_helm_installs_upgrades_and_uninstalls_with_the_clean_up_hook(
    own_plane: ControlPlane, system: str, fleets: str
) -> None:
    plane = own_plane
    before = left_over(plane, system)
    values = reachable()
    with Config(kubeconfig_path=plane.admin, namespace=system) as helm:
        await asyncio.to_thread(helm.install, CHART, "kvrouter", values, namespace=system)
        assert plane.read("mutatingwebhookconfigurations")["items"] == []  # this cluster has policies
        lead(plane, system)
        async with operator_as_deployed(plane, system, "one"):
            await asyncio.to_thread(plane.apply, graph(fleets, "llm", labelKey=RACK, domain="rack"))
            await until(plane, fleets, "dgd/llm", "DomainBalanced")
            held = filled(plane, system)
            await asyncio.to_thread(
                helm.upgrade, CHART, "kvrouter", {**values, "replicas": 3}, namespace=system
            )
            assert plane.read("deployment", NAME, "--namespace", system)["spec"]["replicas"] == 3
            assert filled(plane, system) == held
            lead(plane, system)
            with pytest.raises(KubectlError, match="this cluster knows no ClusterTopologyBinding"):
                await asyncio.to_thread(plane.apply, graph(fleets, "other", **UNKNOWN))
        uninstalled = asyncio.create_task(asyncio.to_thread(helm.uninstall, "kvrouter", timeout=300))
        job = f"job/{NAME}-clean-up"
        await asyncio.to_thread(
            plane.kubectl, "wait", "--for=create", job, "--namespace", system, "--timeout=240s"
        )
        said = await run_job(plane, system, plane.read(job, "--namespace", system))
        assert said.startswith("MutatingAdmissionPolicy")
        await complete(plane, system, f"{NAME}-clean-up")
        await uninstalled
    await until_left(plane, system, before)


def test_helm_renders_the_binding_webhook_on_clusters_without_policies(
    plane_of_1_35: ControlPlane,
) -> None:
    with (
        new_namespace(plane_of_1_35) as system,
        Config(kubeconfig_path=plane_of_1_35.admin, namespace=system) as helm,
    ):
        shown = helm.install(CHART, "kvrouter", namespace=system, dry_run="server")
    assert "name: kvrouter-operator-binding" in shown["manifest"]


def filled(plane: ControlPlane, namespace: str) -> list[Any]:
    """What the operator wrote into what Helm made."""
    secret = plane.read("secret", SECRET, "--namespace", namespace)["data"]
    lease = plane.read("lease", NAME, "--namespace", namespace)["spec"]["holderIdentity"]
    webhook = plane.read("validatingwebhookconfiguration", NAME)["webhooks"][0]["clientConfig"]["caBundle"]
    assert secret
    assert lease
    return [secret, lease, webhook]


async def until(plane: ControlPlane, namespace: str, what: str, condition: str) -> None:
    waited = ("wait", f"--for=condition={condition}", what, "--namespace", namespace, WAIT)
    await asyncio.to_thread(plane.kubectl, *waited)


async def until_leads(plane: ControlPlane, namespace: str) -> None:
    async def leads() -> bool:
        return bool(plane.read("lease", NAME, "--namespace", namespace).get("spec", {}).get("holderIdentity"))

    await eventually(leads)


async def until_left(plane: ControlPlane, namespace: str, wanted: set[str]) -> None:
    """Pods and what belongs to them go a little later."""

    async def is_so() -> bool:
        return left_over(plane, namespace) <= wanted

    with suppress(AssertionError):
        await eventually(is_so)
    assert left_over(plane, namespace) == wanted


async def complete(plane: ControlPlane, namespace: str, job: str) -> None:
    """Let the Job's pod have succeeded, as a kubelet would tell."""
    pods = ("--namespace", namespace, "--selector", f"job-name={job}")
    await asyncio.to_thread(plane.kubectl, "wait", "--for=condition=Ready", "pod", *pods, WAIT)
    (pod,) = plane.read("pods", *pods)["items"]
    status: Manifest = {"status": {"phase": "Succeeded", "conditions": []}}
    name = pod["metadata"]["name"]
    patched = (
        "--namespace",
        namespace,
        "--subresource=status",
        "--type=merge",
        "--patch",
        json.dumps(status),
    )
    plane.kubectl("patch", "pod", name, *patched)

"""What a deployment would become is tried at its admission: kubectl hears what would be refused of it."""

import asyncio
import json
from typing import Any

import pytest

from tests.system.cluster.control_plane import ControlPlane, KubectlError
from tests.system.cluster.operators import WAIT, account_with_roles, graph, install_crds
from tests.system.cluster.refusals import DENIED, MISTAKES, engine_policy, with_main
from tests.system.cluster.webhooks import SERVICE, judging
from tests.testing.processes import eventually

DECODE = "spec.components[2]: the API server would refuse Deployment llm-decode: "


@pytest.fixture(autouse=True)
def crds(plane: ControlPlane) -> None:
    install_crds(plane)


async def apply(plane: ControlPlane, spec: dict[str, Any]) -> list[str]:
    """What kubectl warns of; the operator goes on meanwhile."""
    return await asyncio.to_thread(plane.apply, spec)


async def test_each_mistake_is_refused_at_admission_and_nothing_is_stored(
    plane: ControlPlane, namespace: str
) -> None:
    good = graph(namespace, "llm")
    async with judging(plane, namespace, account_with_roles(plane, namespace, SERVICE)) as replica:
        accounts = plane.read("serviceaccounts", "--namespace", namespace)["items"]
        for mistake, words in MISTAKES.values():
            with pytest.raises(KubectlError) as new:
                await apply(plane, with_main(good, mistake))
            assert DECODE in new.value.said
            assert words in new.value.said
        assert plane.read("dgd,deployments,serviceaccounts", "--namespace", namespace)["items"] == accounts
        assert await apply(plane, good) == []
        plane.kubectl("wait", "--for=condition=Ready", "dgd/llm", "--namespace", namespace, WAIT)
        for mistake, words in MISTAKES.values():
            with pytest.raises(KubectlError) as change:
                await apply(plane, with_main(good, mistake))
            assert words in change.value.said
        good["spec"]["components"][2]["replicas"] = 1
        assert await apply(plane, good) == []
        assert "forbidden" not in replica.log
        assert "deployment_failed" not in replica.log


async def test_quota_and_policy_refusals_reach_the_writer_but_allow_scaling(
    plane: ControlPlane, namespace: str
) -> None:
    policy, binding = engine_policy(namespace)
    name = policy["metadata"]["name"]
    denied = with_main(graph(namespace, "llm"), {"image": "example.com/denied:1"})
    async with judging(plane, namespace, account_with_roles(plane, namespace, SERVICE)):
        assert await apply(plane, denied) == []
        plane.kubectl("wait", "--for=condition=Ready", "dgd/llm", "--namespace", namespace, WAIT)
        with (
            plane.deleting("validatingadmissionpolicy", name),
            plane.deleting("validatingadmissionpolicybinding", name),
        ):
            plane.apply(policy, binding)
            changed = with_main(denied, {"args": ["worker", "mock", "--role", "decode", "--speedup", "2"]})

            async def is_denied() -> bool:
                try:
                    plane.kubectl(
                        "apply", "--dry-run=server", "--server-side", "-f", "-", stdin=json.dumps(changed)
                    )
                except KubectlError as error:
                    return DENIED in error.said and DECODE in error.said
                return False

            await eventually(is_denied)
            denied["spec"]["components"][1]["replicas"] = 1
            assert await apply(plane, denied) == [], "prefill's image is no matter of the rule"
            quota = {"kind": "ResourceQuota", "metadata": {"namespace": namespace, "name": "few"}}
            plane.apply({"apiVersion": "v1", **quota, "spec": {"hard": {"count/services": "1"}}})

            async def is_counted() -> bool:
                found = plane.read("resourcequota", "few", "--namespace", namespace)
                return "used" in found.get("status", {})

            await eventually(is_counted)
            with pytest.raises(KubectlError, match="exceeded quota: few"):
                await apply(plane, graph(namespace, "other"))


async def test_api_server_warnings_reach_the_writer_at_admission(plane: ControlPlane, namespace: str) -> None:
    plane.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/warn=restricted")
    changed = with_main(graph(namespace, "llm"), {"image": "example.com/engine:1"})
    async with judging(plane, namespace, account_with_roles(plane, namespace, SERVICE)):
        assert await apply(plane, graph(namespace, "other")) == []
        found = await apply(plane, changed)
        assert found[0].startswith(
            "Warning: spec.components[2]: the API server warns of Deployment llm-decode:"
        )
        assert 'would violate PodSecurity "restricted:latest"' in found[0]


async def test_a_deployment_is_admitted_with_a_warning_without_dry_run_rights(
    plane: ControlPlane, namespace: str
) -> None:
    account = account_with_roles(
        plane, namespace, SERVICE, watchNamespace="kube-public", rbac={"nodes": False}
    )
    async with judging(plane, namespace, account):
        (warning,) = await apply(plane, graph(namespace, "llm"))
        assert "was not tried at the API server beforehand" in warning
        assert "cannot patch resource" in warning

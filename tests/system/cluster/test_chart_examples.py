"""What the repository shows, on a control plane: the folders of kustomize, and the example deployments."""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

from tests.system.cluster.charted import NAME, lead, left_over, operator_as_deployed, reachable
from tests.system.cluster.control_plane import ControlPlane
from tests.system.cluster.grove import install_grove
from tests.system.cluster.namespaces import new_namespace
from tests.system.cluster.operators import WAIT, install_crds
from tests.testing.helm_chart import is_hook, of_kind, rendered

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples" / "kubernetes"
FILES = sorted(str(path.relative_to(EXAMPLES)) for path in EXAMPLES.rglob("*.yaml"))
ELSEWHERE = {"vllm.yaml", "migration/before.yaml"}
"""Their pods ask for a claim or for zones that these nodes do not have."""
WITHOUT_POLICY = {"one-zone.yaml", "autoscaled.yaml"}
SYSTEM = "kvrouter-system"
OURS = "app.kubernetes.io/part-of=kvrouter"


@pytest.fixture
def system(own_plane: ControlPlane) -> Iterator[str]:
    """The namespace of the operator."""
    install_crds(own_plane)
    with new_namespace(own_plane) as name:
        yield name


@pytest.mark.parametrize("folder", ["default", "nats"])
def test_a_kustomize_folder_installs_with_restricted_pods_and_uninstalls(
    own_plane: ControlPlane, folder: str
) -> None:
    plane = own_plane
    before = left_over(plane, "default")
    path = str(ROOT / "deploy" / "kustomize" / folder)
    install_crds(plane)
    plane.kubectl("apply", "--server-side", "--kustomize", path)
    plane.kubectl("rollout", "status", f"deployment/{NAME}", "--namespace", SYSTEM, WAIT)
    if folder == "nats":
        plane.kubectl("rollout", "status", "statefulset/kvrouter-nats", "--namespace", SYSTEM, WAIT)
    pods = plane.read("pods", "--namespace", SYSTEM)["items"]
    assert len(pods) == (3 if folder == "nats" else 2)
    plane.kubectl("delete", "--kustomize", path, "--ignore-not-found")
    assert plane.read("customresourcedefinitions", "--selector", OURS)["items"]
    until_stored(plane)
    plane.kubectl("delete", "customresourcedefinitions", "--selector", OURS)
    assert left_over(plane, "default") - before == set()
    assert not [name for name in left_over(plane, "default") if name.startswith("Namespace")]


def until_stored(plane: ControlPlane) -> None:
    """Return once objects of every definition can be listed: one that is deleted sooner stays for minutes."""
    for definition in plane.read("customresourcedefinitions")["items"]:
        name = definition["metadata"]["name"]
        plane.kubectl("wait", "--for=condition=Established", f"crd/{name}", WAIT)
        plane.until_served(name)


async def test_every_example_is_admitted_without_a_warning_and_deployed(
    own_plane: ControlPlane, system: str
) -> None:
    plane = own_plane
    install_grove(plane)
    plane.apply(*(each for each in rendered(reachable(), namespace=system) if not is_hook(each)))
    lead(plane, system)
    async with operator_as_deployed(plane, system, "one") as one:
        with ExitStack() as stack:
            for file in FILES:
                namespace = stack.enter_context(new_namespace(plane))
                documents = list(yaml.safe_load_all((EXAMPLES / file).read_text()))
                for each in documents:
                    if each["kind"] in ("DynamoGraphDeployment", "HorizontalPodAutoscaler"):
                        each["metadata"]["namespace"] = namespace
                assert await asyncio.to_thread(plane.apply, *documents) == [], file
                for each in of_kind(documents, "DynamoGraphDeployment"):
                    await becomes(plane, namespace, each["metadata"]["name"], file)
                plane.kubectl("delete", "dgd", "--all", "--namespace", namespace)
        assert "forbidden" not in one.log
    plane.kubectl("delete", "validatingwebhookconfiguration", NAME)


async def becomes(plane: ControlPlane, namespace: str, name: str, file: str) -> None:
    """Wait until it is Ready, and balanced where it has a policy; or until its pods are wanted."""
    of = ("--namespace", namespace, WAIT)
    if file in ELSEWHERE:
        wanted = f"deployment/{name}-decode"
        await asyncio.to_thread(plane.kubectl, "wait", "--for=create", wanted, *of)
        return
    conditions = ["Ready"] if file in WITHOUT_POLICY else ["Ready", "DomainBalanced"]
    for condition in conditions:
        await asyncio.to_thread(plane.kubectl, "wait", f"--for=condition={condition}", f"dgd/{name}", *of)

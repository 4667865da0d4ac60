"""What ``kvrouter operator convert`` writes is taken by the API server: its definition, and the webhook."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest_asyncio
import yaml

from tests.system.cluster.control_plane import ControlPlane
from tests.system.cluster.grove import install_grove, topology
from tests.system.cluster.namespaces import new_namespace
from tests.system.cluster.operators import account_with_roles, install_crds
from tests.system.cluster.webhooks import SERVICE, judging

FILES = sorted((Path(__file__).parents[2] / "data" / "manifests" / "dynamo").glob("*.yaml"))
NEVER = "never registers"
ENDS_WITHIN_S = 60.0


@pytest_asyncio.fixture
async def namespace(own_plane: ControlPlane) -> AsyncIterator[str]:
    """A namespace whose deployments an operator judges, in a cluster with the topology that they name."""
    install_crds(own_plane)
    install_grove(own_plane)
    levels = {"zone": "topology.kubernetes.io/zone", "rack": "example.com/rack"}
    own_plane.apply(topology("fabric", levels))
    with new_namespace(own_plane) as name:
        async with judging(own_plane, name, account_with_roles(own_plane, name, SERVICE)):
            yield name


def converted(path: Path) -> list[dict[str, Any]]:
    """The manifests that the command writes."""
    argv = [sys.executable, "-m", "kvrouter.cli", "operator", "convert", str(path)]
    done = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=ENDS_WITHIN_S)
    assert done.returncode == 1, "something of each is lost"
    assert ": lost: " in done.stderr
    return [*yaml.safe_load_all(done.stdout)]


async def test_the_api_server_accepts_converted_deployments(own_plane: ControlPlane, namespace: str) -> None:
    dry_run = ("apply", "--dry-run=server", "--server-side", "--validate=strict", "-f", "-")
    for path in FILES:
        for manifest in converted(path):
            manifest["metadata"]["namespace"] = namespace
            taken = await asyncio.to_thread(own_plane.kubectl, *dry_run, stdin=json.dumps(manifest))
            assert "serverside-applied" in taken, path


async def test_containers_that_never_register_are_warned_of_when_applied(
    own_plane: ControlPlane, namespace: str
) -> None:
    (path,) = (path for path in FILES if path.stem == "epp-v1beta1")
    (manifest,) = converted(path)
    manifest["metadata"]["namespace"] = namespace
    warnings = await asyncio.to_thread(own_plane.apply, manifest)
    places = [warning.split(": ")[1] for warning in warnings if NEVER in warning]
    at = "spec.components[1].podTemplate.spec"
    assert places == [f"{at}.containers[0]", f"{at}.initContainers[0]"]

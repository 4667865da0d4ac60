"""One control plane for the whole run, with nodes in three zones; a namespace for each test."""

import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from itertools import count
from pathlib import Path

import pytest
import pytest_asyncio
from kubernetes.aio.client import ApiClient
from kubernetes.aio.config import new_client_from_config

from tests.cluster.control_plane import ControlPlane

KEPT_LOGS = pytest.StashKey[Path]()
ZONES = ("zone-a", "zone-b", "zone-c")
NODES_PER_ZONE = 2
_numbers = count(1)


@pytest.fixture(scope="session")
def plane(request: pytest.FixtureRequest) -> Iterator[ControlPlane]:
    """The control plane, ready. Its logs outlive the run when a test fails."""
    folder = Path(tempfile.mkdtemp(prefix="kvrouter-cluster-"))
    plane = ControlPlane(folder)
    keeps_logs = True
    try:
        plane.start()
        _add_nodes(plane)
        yield plane
        keeps_logs = request.session.testsfailed > 0
    finally:
        plane.kill()
        if keeps_logs:
            plane.keep_only_logs()
            request.config.stash[KEPT_LOGS] = folder / "logs"
        else:
            shutil.rmtree(folder)


@pytest.fixture
def namespace(plane: ControlPlane) -> Iterator[str]:
    """A namespace of the test's own, where pods may be made; it is deleted at the end."""
    name = f"test-{next(_numbers)}"
    plane.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    plane.kubectl("wait", "--for=create", "serviceaccount/default", "--namespace", name, "--timeout=60s")
    yield name
    plane.kubectl("delete", "namespace", name, "--wait=false")


@pytest_asyncio.fixture
async def api(plane: ControlPlane) -> AsyncIterator[ApiClient]:
    """The Python client, with the administrator's rights."""
    api: ApiClient = await new_client_from_config(str(plane.admin))
    async with api:
        yield api


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Tell where the logs of the servers are."""
    if KEPT_LOGS in config.stash:
        terminalreporter.write_line(f"The logs of the control plane: {config.stash[KEPT_LOGS]}")


def _add_nodes(plane: ControlPlane) -> None:
    for zone in ZONES:
        for i in range(NODES_PER_ZONE):
            rack = {"example.com/rack": f"{zone}-rack-{i}"}
            place = {"topology.kubernetes.io/region": "region-1", "topology.kubernetes.io/zone": zone}
            plane.add_node(f"{zone}-{i}", {**place, **rack})
    plane.kubectl("wait", "--for=condition=Ready", "nodes", "--all", "--timeout=120s")

"""One control plane for the whole run, with nodes in three zones; a namespace for each test.

etcd and the API server serve first. Tests that need no more are marked ``api_server`` and run before the
others, the first of which has the control plane completed.
"""

import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import pytest_asyncio
from kubernetes.aio.client import ApiClient
from kubernetes.aio.config import new_client_from_config

from tests.system.cluster.control_plane import AS_1_35, AS_BEFORE_1_35, ControlPlane
from tests.system.cluster.namespaces import new_namespace
from tests.system.cluster.nodes import add_nodes
from tests.testing.asyncio_transports import track_transports

PLANES = ("plane", "own_plane", "older_plane", "plane_of_1_35")
KEPT_LOGS = pytest.StashKey[list[Path]]()


@pytest_asyncio.fixture(autouse=True)
async def _connections_end() -> AsyncIterator[None]:
    """Close a test's loop after its last connection: both sides end TLS by a word that nobody awaits.

    One that nobody closes fails the test that opened it, by name.
    """
    with track_transports() as transports:
        yield
        await transports.until_ended()


@pytest.fixture(autouse=True)
def _complete(request: pytest.FixtureRequest) -> None:
    """Complete the control planes of a test that needs more than an API server."""
    for name in PLANES:
        if _needs_more(request.node) and name in request.fixturenames:
            plane: ControlPlane = request.getfixturevalue(name)
            if not plane.is_complete:
                plane.complete()
                add_nodes(plane)


@pytest.fixture(scope="session")
def plane(request: pytest.FixtureRequest) -> Iterator[ControlPlane]:
    """The control plane. Its logs outlive the run when a test fails."""
    with _running(request) as plane:
        yield plane


@pytest.fixture(scope="module")
def older_plane(request: pytest.FixtureRequest) -> Iterator[ControlPlane]:
    """Another one, without what older clusters do not have."""
    with _running(request, flags=AS_BEFORE_1_35) as plane:
        yield plane


@pytest.fixture(scope="module")
def plane_of_1_35(request: pytest.FixtureRequest) -> Iterator[ControlPlane]:
    """Another one, which copies labels of bindings and has no policies to write them there."""
    with _running(request, flags=AS_1_35) as plane:
        yield plane


@pytest.fixture(scope="module")
def own_plane(request: pytest.FixtureRequest) -> Iterator[ControlPlane]:
    """Another one, whose nodes and servers a test may disturb."""
    with _running(request) as plane:
        yield plane


@pytest.fixture
def namespace(plane: ControlPlane) -> Iterator[str]:
    """A namespace of the test's own, where pods may be made; it is deleted at the end."""
    with new_namespace(plane) as name:
        yield name


@pytest_asyncio.fixture
async def api(plane: ControlPlane) -> AsyncIterator[ApiClient]:
    """The Python client, with the administrator's rights."""
    api: ApiClient = await new_client_from_config(str(plane.admin))
    async with api:
        yield api


def pytest_configure(config: pytest.Config) -> None:
    """Remember which logs are kept."""
    config.stash[KEPT_LOGS] = []
    config.addinivalue_line("markers", "api_server(is_enough=True): needs etcd and the API server alone")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that an API server is enough for come first."""
    items.sort(key=_needs_more)


def _needs_more(item: pytest.Item) -> bool:
    marker = item.get_closest_marker("api_server")
    return marker is None or not marker.kwargs.get("is_enough", True)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Tell where the logs of the servers are."""
    for folder in config.stash[KEPT_LOGS]:
        terminalreporter.write_line(f"The logs of a control plane: {folder}")


@contextmanager
def _running(request: pytest.FixtureRequest, *, flags: Sequence[str] = ()) -> Iterator[ControlPlane]:
    folder = Path(tempfile.mkdtemp(prefix="kvrouter-cluster-"))
    plane = ControlPlane(folder, flags=flags)
    keeps_logs = True
    try:
        plane.start()
        yield plane
        keeps_logs = request.session.testsfailed > 0
    finally:
        plane.kill()
        if keeps_logs:
            plane.keep_only_logs()
            request.config.stash[KEPT_LOGS].append(folder / "logs")
        else:
            shutil.rmtree(folder)

"""Whose the definition is, and that work runs only while it is kvrouter's."""

import asyncio
from datetime import UTC, datetime
from pathlib import Path
from typing import cast

import pytest

from kvrouter.kube.client import ClusterError, ClusterLost, KubeClient, RequestRefused
from kvrouter.kube.objects import Key, Manifest, ResourceKind
from kvrouter.operator.admission.certificates import SERVING_CERT, SERVING_KEY, renewed
from kvrouter.operator.cluster_info import DEPLOYMENTS_OF_GRAPHS
from kvrouter.operator.instrumentation import OperatorInstrumentation, ReplicaHealth
from kvrouter.operator.reconcile.definition import Definition, why_not_ours
from kvrouter.operator.servers import ADMISSION, AdmissionWork, CertificateFiles
from tests.testing.planned_deployments import DEFAULTS
from tests.testing.static_cluster import StaticCluster

OURS: Manifest = {"metadata": {"annotations": {"kvrouter.dev/definition": "0.1.0"}}}
FOREIGN: Manifest = {"metadata": {"annotations": {"helm.sh/resource-policy": "keep"}}}


@pytest.mark.parametrize(
    ("definition", "why"),
    [(OURS, None), (FOREIGN, "another project's"), ({}, "another project's"), (None, "not installed")],
)
def test_a_definition_is_kvrouters_by_its_annotation(definition: Manifest | None, why: str | None) -> None:
    found = why_not_ours(definition)
    assert (found is None) if why is None else (found is not None and why in found)


class Server:
    """An API server with one definition, or an error in its place."""

    def __init__(self) -> None:
        self.definition: Manifest | Exception | None = FOREIGN
        self.lost: asyncio.Queue[None] = asyncio.Queue()

    async def read(self, _kind: ResourceKind, _key: Key) -> Manifest | None:
        if isinstance(self.definition, Exception):
            self.lost.put_nowait(None)
            raise self.definition
        return self.definition


class Looked(StaticCluster):
    """A quiet cluster with one definition."""

    def __init__(self) -> None:
        super().__init__({})
        self.definition = FOREIGN
        self.looked: asyncio.Queue[None] = asyncio.Queue()

    async def read(self, kind: ResourceKind, key: Key) -> Manifest | None:
        self.looked.put_nowait(None)
        return self.definition


class Reports(OperatorInstrumentation):
    """Collects why the definition is not kvrouter's, each time that changes."""

    def __init__(self) -> None:
        super().__init__(ReplicaHealth())
        self.queue: asyncio.Queue[str | None] = asyncio.Queue()

    def definition_is(self, why: str | None) -> None:
        self.queue.put_nowait(why)


async def test_work_runs_only_while_the_definition_is_kvrouters() -> None:
    server, reports = Server(), Reports()
    definition = Definition(cast(KubeClient, server), reports, check_each_s=0.001)
    states: asyncio.Queue[str] = asyncio.Queue()

    async def work() -> None:
        states.put_nowait("begun")
        try:
            await asyncio.Event().wait()
        finally:
            states.put_nowait("ended")

    async with asyncio.timeout(30.0), asyncio.TaskGroup() as group:
        tasks = [group.create_task(definition.run()), group.create_task(definition.while_ours(work))]
        assert "another project's" in str(await reports.queue.get())
        assert (definition.is_ours, states.empty()) == (False, True)
        server.definition = OURS
        assert (await reports.queue.get(), await states.get()) == (None, "begun")
        server.definition = RequestRefused("forbidden", status=403)
        assert "may not be read" in str(await reports.queue.get())
        assert (await states.get(), definition.is_ours) == ("ended", False)
        server.definition = OURS
        assert (await reports.queue.get(), await states.get()) == (None, "begun")
        for task in tasks:
            task.cancel()
    assert reports.queue.empty()


@pytest.mark.parametrize(
    "failure",
    [
        ClusterLost("connection refused"),
        RequestRefused("too many requests", status=429),
        RequestRefused("etcdserver: leader changed", status=500),
        RequestRefused("the server is shutting down", status=503),
        RequestRefused("Unauthorized", status=401),
    ],
)
async def test_last_seen_definition_holds_while_the_api_server_cannot_be_asked(failure: ClusterError) -> None:
    server, reports = Server(), Reports()
    server.definition = OURS
    definition = Definition(cast(KubeClient, server), reports, check_each_s=0.001)
    looking = asyncio.create_task(definition.run())
    async with asyncio.timeout(30.0):
        assert await reports.queue.get() is None
        server.definition = failure
        for _ in range(3):
            await server.lost.get()
        assert definition.is_ours
        server.definition = FOREIGN
        assert "another project's" in str(await reports.queue.get())
    looking.cancel()
    await asyncio.gather(looking, return_exceptions=True)


async def test_admission_lists_no_deployments_under_another_projects_definition(tmp_path: Path) -> None:
    data = renewed(datetime.now(UTC), {}, ("localhost",))
    assert data is not None
    for name in (SERVING_CERT, SERVING_KEY):
        (tmp_path / name).write_bytes(data[name])
    server, health = Looked(), ReplicaHealth()
    health.waits_for(ADMISSION, "it does not listen yet")
    observed = OperatorInstrumentation(health)
    definition = Definition(server, observed, check_each_s=0.001)
    work = AdmissionWork(
        certificate=CertificateFiles(cert=tmp_path / SERVING_CERT, key=tmp_path / SERVING_KEY),
        defaults=DEFAULTS,
        namespace="",
        class_name="kvrouter",
        host="127.0.0.1",
        port=0,
    )
    async with asyncio.timeout(30.0), asyncio.TaskGroup() as group:
        answering = group.create_task(work.run(server, definition, observed, health))
        looking = group.create_task(definition.run())
        while ADMISSION in (health.why_not_ready() or ""):
            await server.looked.get()
        for _ in range(3):
            await server.looked.get()
        assert server.listed.empty()
        server.definition = OURS
        while await server.listed.get() != DEPLOYMENTS_OF_GRAPHS:
            pass
        for task in (answering, looking):
            task.cancel()

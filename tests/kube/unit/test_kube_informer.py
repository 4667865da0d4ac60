"""The informer: lost and back when that is so, and of nodes no more than is needed."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
from aiohttp import web
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.config import ConfigException

from kvrouter.kube import client
from kvrouter.kube.client import ClusterError, ClusterLost, KubeClient
from kvrouter.kube.informer import FirstTries, Informer
from kvrouter.kube.kubeconfig import LoaderConnection
from kvrouter.kube.objects import Manifest, ResourceKind, metadata_of
from kvrouter.operator.cluster_info import NODES, PODS
from tests.testing.asyncio_servers import port_of, serving
from tests.testing.constants import SetConstants

Watching = Callable[[web.StreamResponse], Awaitable[None]]


async def test_server_dropping_connections_is_reported_lost_once_and_back_once() -> None:
    tries: asyncio.Queue[int] = asyncio.Queue()
    is_up = asyncio.Event()

    async def watching(reported: web.StreamResponse) -> None:
        await asyncio.Event().wait()

    async def taking(request: web.Request) -> None:
        tries.put_nowait(1)
        if not is_up.is_set() and request.transport is not None:
            request.transport.abort()

    losses: asyncio.Queue[ClusterError | None] = asyncio.Queue()
    async with api_server(watching, taking=taking) as cluster, watched(cluster, PODS, losses.put_nowait):
        for _ in range(5):
            await tries.get()
        assert losses.qsize() == 1
        is_up.set()
        assert isinstance(await losses.get(), ClusterError)
        assert await losses.get() is None


async def test_list_refused_only_at_the_start_is_not_reported_as_lost() -> None:
    """As while a definition is new: the API server answers 404, or 429."""
    refusals: list[web.HTTPException] = [
        web.HTTPNotFound(text='{"kind": "Status", "code": 404, "reason": "NotFound"}'),
        web.HTTPTooManyRequests(text='{"kind": "Status", "code": 429}', headers={"Retry-After": "0"}),
        web.HTTPForbidden(text='{"kind": "Status", "code": 403, "reason": "Forbidden"}'),
    ]

    async def watching(reported: web.StreamResponse) -> None:
        await asyncio.Event().wait()

    async def taking(request: web.Request) -> None:
        if "watch" not in request.query and refusals:
            raise refusals.pop()

    losses: list[ClusterError | None] = []
    async with (
        asyncio.timeout(30.0),
        api_server(watching, taking=taking) as cluster,
        watched(cluster, NODES, losses.append, first_within_s=60.0) as (informer, _),
    ):
        await informer.synced.wait()
    assert refusals == []
    assert losses == []


async def test_list_refused_for_longer_is_reported_lost_once() -> None:
    tries: asyncio.Queue[float] = asyncio.Queue()

    async def watching(reported: web.StreamResponse) -> None:
        await asyncio.Event().wait()

    async def taking(_request: web.Request) -> None:
        tries.put_nowait(asyncio.get_running_loop().time())
        raise web.HTTPForbidden(text='{"kind": "Status", "code": 403, "reason": "Forbidden"}')

    losses: asyncio.Queue[ClusterError | None] = asyncio.Queue()
    async with (
        asyncio.timeout(30.0),
        api_server(watching, taking=taking) as cluster,
        watched(cluster, NODES, losses.put_nowait, first_within_s=0.2),
    ):
        began = await tries.get()
        assert isinstance(await losses.get(), ClusterError)
        assert asyncio.get_running_loop().time() - began > 0.15
        for _ in range(tries.qsize() + 2):
            await tries.get()
        assert losses.empty()


def test_a_definition_served_five_seconds_late_is_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr("kvrouter.kube.informer.time.monotonic", lambda: now_s)
    tries = FirstTries()
    found = []
    for seconds in (0.0, 5.0, 2.0, 3.0):
        now_s += seconds
        found.append(tries.is_loss())
    assert found == [False, False, False, True]


async def test_first_expired_version_is_not_reported_as_lost() -> None:
    refusals = [web.HTTPGone(text='{"kind": "Status", "code": 410, "reason": "Expired"}')]

    async def watching(reported: web.StreamResponse) -> None:
        await reported.write(line("ADDED", pod("one")))
        await asyncio.Event().wait()

    async def taking(_request: web.Request) -> None:
        if refusals:
            raise refusals.pop()

    losses: list[ClusterError | None] = []
    async with (
        asyncio.timeout(30.0),
        api_server(watching, taking=taking) as cluster,
        watched(cluster, PODS, losses.append) as (_, changed),
    ):
        assert metadata_of(await changed.get())["name"] == "one"
    assert losses == []


@pytest.mark.parametrize("depth", [1_000, 5_000, 9_990])
async def test_deeply_nested_object_does_not_hide_other_objects(depth: int) -> None:
    listed = b'{"metadata": {"name": "deep", "resourceVersion": "1"}, "spec": %b1%b}' % (
        b'{"a":' * depth,
        b"}" * depth,
    )

    async def watching(reported: web.StreamResponse) -> None:
        await reported.write(b'{"type": "MODIFIED", "object": ' + listed + b"}\n")
        await reported.write(line("ADDED", pod("other")))
        await asyncio.Event().wait()

    losses: list[ClusterError | None] = []
    async with (
        api_server(watching, listed) as cluster,
        watched(cluster, PODS, losses.append) as (pods, changed),
    ):
        names = [metadata_of(await changed.get())["name"] for _ in range(3)]
        assert len(list(pods.all())) == 2
    assert names == ["deep", "deep", "other"]
    assert losses == []


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> asyncio.Queue[float]:
    """How long the informer would sleep each time, in seconds; it goes on at once."""
    found: asyncio.Queue[float] = asyncio.Queue()
    sleep = asyncio.sleep

    async def sleeping(delay_s: float) -> None:
        found.put_nowait(delay_s)
        await sleep(0)

    monkeypatch.setattr("kvrouter.kube.informer.asyncio.sleep", sleeping)
    return found


@pytest.mark.parametrize("reported_first", [b"", b'{"type": "ERROR", "object": {"code": 410}}\n'])
async def test_server_that_ends_each_watch_at_once_is_retried_ever_later(
    reported_first: bytes, waits: asyncio.Queue[float]
) -> None:
    watches: asyncio.Queue[None] = asyncio.Queue()

    async def watching(reported: web.StreamResponse) -> None:
        await reported.write(reported_first)
        watches.put_nowait(None)

    losses: list[ClusterError | None] = []
    async with (
        asyncio.timeout(30.0),
        api_server(watching) as cluster,
        watched(cluster, PODS, losses.append) as (pods, _),
    ):
        pods.lives_least_s = 60.0  # however slow this machine is, no watch counts as a good one
        for _ in range(12):
            await watches.get()
    first = [waits.get_nowait() for _ in range(10)]
    assert first == sorted(set(first))
    assert len(losses) == 1


async def test_refused_watch_waits_as_long_as_the_server_asks(
    waits: asyncio.Queue[float],
) -> None:
    watches = iter((False, True))

    async def watching(reported: web.StreamResponse) -> None:
        await reported.write(line("ADDED", pod("one")))

    async def taking(_request: web.Request) -> None:
        if next(watches, True):
            raise web.HTTPTooManyRequests(headers={"Retry-After": "30"})

    async with (
        asyncio.timeout(30.0),
        api_server(watching, taking=taking) as cluster,
        watched(cluster, PODS) as (pods, _),
    ):
        pods.lives_least_s = -1.0  # the first watch ends in good order, however soon
        assert await waits.get() >= 30.0


async def test_a_page_of_large_objects_is_asked_for_in_smaller_pieces(
    set_constants: SetConstants,
) -> None:
    limits: list[int] = []
    objects = [{**pod(f"pod-{i}"), "data": "x" * 1_000} for i in range(100)]

    async def answer(request: web.Request) -> web.Response:
        limits.append(int(request.query["limit"]))
        first = int(request.query.get("continue", 0))
        last = first + limits[-1]
        more = str(last) if last < len(objects) else ""
        return web.json_response({"metadata": {"continue": more}, "items": objects[first:last]})

    set_constants(client, ANSWER_MAX_BYTES=10_000)
    async with served(answer) as cluster:
        found = await cluster.find(PODS)
        assert [metadata_of(each)["name"] for each in found.objects] == [f"pod-{i}" for i in range(100)]
        set_constants(client, ANSWER_MAX_BYTES=500)
        with pytest.raises(ClusterLost, match="more than 500 bytes"):
            await cluster.find(PODS)
    assert limits[:4] == [500, 125, 31, 7]
    assert limits[-1] == 1


@pytest.mark.parametrize("error", [OSError("no such file"), ConfigException("Token file exists but empty.")])
async def test_a_token_that_cannot_be_read_is_read_again(error: Exception) -> None:
    async def watching(reported: web.StreamResponse) -> None:
        await reported.write(line("ADDED", pod("one")))
        await asyncio.Event().wait()

    failures = [error, error]

    def signing(_configuration: Configuration) -> None:
        if failures:
            raise failures.pop()

    losses: list[ClusterError | None] = []
    async with (
        asyncio.timeout(30.0),
        api_server(watching, signing=signing) as cluster,
        watched(cluster, PODS, losses.append) as (_, changed),
    ):
        assert metadata_of(await changed.get())["name"] == "one"
    assert isinstance(losses[0], ClusterLost)


async def test_only_metadata_of_nodes_is_requested_and_kept() -> None:
    accepted: list[str] = []

    async def watching(reported: web.StreamResponse) -> None:
        await reported.write(line("ADDED", pod("node-2", managedFields=[{"manager": "kubelet"}])))
        await asyncio.Event().wait()

    async def taking(request: web.Request) -> None:
        accepted.append(request.headers["Accept"])

    there = json.dumps(pod("node-1", managedFields=[{"manager": "kubelet"}])).encode()
    async with (
        api_server(watching, there, taking=taking) as cluster,
        watched(cluster, NODES) as (nodes, changed),
    ):
        for _ in range(2):
            await changed.get()
        assert all("managedFields" not in metadata_of(node) for node in nodes.all())
    assert [found.partition(";g=")[0] for found in accepted] == [
        "application/json;as=PartialObjectMetadataList",
        "application/json;as=PartialObjectMetadata",
    ]


async def test_unused_pod_fields_are_not_kept() -> None:
    whole = {
        **pod("listed", labels={"a": "b"}, annotations={"note": "x"}),
        "spec": {"nodeName": "n", "containers": [{"name": "main"}]},
        "status": {
            "phase": "Running",
            "conditions": [],
            "containerStatuses": [],
            "podIP": "10.0.0.1",
            "qosClass": "Burstable",
        },
    }

    async def watching(reported: web.StreamResponse) -> None:
        await reported.write(line("ADDED", {**whole, "metadata": pod("seen")["metadata"]}))
        await asyncio.Event().wait()

    async with (
        asyncio.timeout(30.0),
        api_server(watching, json.dumps(whole).encode()) as cluster,
        watched(cluster, PODS) as (_, changed),
    ):
        for name in ("listed", "seen"):
            found = await changed.get()
            assert metadata_of(found)["name"] == name
            assert found["spec"] == {"nodeName": "n"}
            assert found["status"] == {
                "phase": "Running",
                "conditions": [],
                "containerStatuses": [],
                "podIP": "10.0.0.1",
            }


def pod(name: str, **metadata: object) -> dict[str, object]:
    return {"metadata": {"name": name, "resourceVersion": "2", **metadata}}


def line(change: str, thing: object) -> bytes:
    return json.dumps({"type": change, "object": thing}).encode() + b"\n"


async def nothing(_request: web.Request) -> None:
    return None


@asynccontextmanager
async def api_server(
    watching: Watching,
    there: bytes = b"",
    taking: Callable[[web.Request], Awaitable[None]] = nothing,
    signing: Callable[[Configuration], None] = lambda _: None,
) -> AsyncIterator[KubeClient]:
    """Lists what is ``there``, as JSON; ``watching`` tells on each watch, and ``taking`` may refuse it.
    ``signing`` is asked for the token of each call.
    """

    async def answer(request: web.Request) -> web.StreamResponse:
        if "watch" not in request.query:
            if request.match_info["plural"] == "nodes":
                await taking(request)
            items = b'{"metadata": {"resourceVersion": "1"}, "items": [%b]}' % there
            return web.Response(body=items, content_type="application/json")
        await taking(request)
        reported = web.StreamResponse()
        await reported.prepare(request)
        await watching(reported)
        return reported

    async with served(answer, signing) as cluster:
        yield cluster


@asynccontextmanager
async def served(
    answer: Callable[[web.Request], Awaitable[web.StreamResponse]],
    signing: Callable[[Configuration], None] = lambda _: None,
) -> AsyncIterator[KubeClient]:
    """A client of a server whose kinds are answered by ``answer``."""
    app = web.Application()
    app.router.add_get("/api/v1/{plural}", answer)
    async with serving(app) as server:
        host = f"http://127.0.0.1:{port_of(server)}"
        configuration = Configuration(host=host, api_key={"BearerToken": "token"})
        cast(Any, configuration).refresh_api_key_hook = signing
        async with ApiClient(configuration) as api:
            yield KubeClient(LoaderConnection(api))


@asynccontextmanager
async def watched(
    cluster: KubeClient,
    kind: ResourceKind,
    lost: Callable[[ClusterError | None], None] = lambda _: None,
    first_within_s: float = 0.0,
) -> AsyncIterator[tuple[Informer[None], asyncio.Queue[Manifest]]]:
    """Each object that came, changed or went is put into the queue."""
    changed: asyncio.Queue[Manifest] = asyncio.Queue()
    found: Informer[None] = Informer(
        cluster,
        kind,
        group_of=lambda _: None,
        changed=changed.put_nowait,
        lost=lost,
        retry_s=0.01,
        first_within_s=first_within_s,
    )
    async with asyncio.TaskGroup() as group:
        task = group.create_task(found.run())
        yield found, changed
        task.cancel()

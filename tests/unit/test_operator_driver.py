"""What the leader does about nodes: no more than it must, where there are thousands of them."""

import asyncio
from collections.abc import AsyncGenerator, Callable

import pytest

from kvrouter.operator.reconcile.cluster import Change, Cluster, Found
from kvrouter.operator.reconcile.driver import Driver
from kvrouter.operator.reconcile.kinds import NODES, PODS, Key, Kind, Manifest
from kvrouter.operator.reconcile.reconciler import node_name_of
from tests.support.deployments import DEFAULTS

THERE: dict[Kind, list[Manifest]] = {
    NODES: [{"metadata": {"name": f"n{number}", "resourceVersion": "1"}} for number in range(50)],
    PODS: [
        {
            "metadata": {
                "namespace": "team",
                "name": f"llm-decode-{number}",
                "resourceVersion": "1",
                "labels": {"kvrouter.dev/deployment": "llm"},
            },
            "spec": {"nodeName": f"n{number}"},
        }
        for number in range(5)
    ],
}


class Quiet(Cluster):
    """A cluster of these nodes and pods, in which a node's label changes once."""

    def __init__(self) -> None:
        self.nodes_may_come = asyncio.Event()
        self.relabelled = asyncio.Event()

    async def find(self, kind: Kind, *, namespace: str = "", labels: str = "") -> Found:
        if kind == NODES:
            await self.nodes_may_come.wait()
        return Found(THERE.get(kind, []), "1")

    async def watch(
        self,
        kind: Kind,
        version: str,
        *,
        namespace: str = "",
        labels: str = "",
        for_s: int,
        opened: Callable[[], None] = lambda: None,
    ) -> AsyncGenerator[tuple[Change, Manifest], None]:
        if kind == NODES:
            yield (
                Change.MODIFIED,
                {"metadata": {"name": "n1", "resourceVersion": "2", "labels": {"example.com/rack": "r1"}}},
            )
            self.relabelled.set()
        await asyncio.Event().wait()

    async def served(self, group_version: str) -> frozenset[str]:
        return frozenset()

    async def version(self) -> tuple[int, int]:
        return (1, 34)


class Looks:
    """Hears which deployments are looked at."""

    def __init__(self) -> None:
        self.done: asyncio.Queue[Key] = asyncio.Queue()

    def looked(self, key: Key, _duration_s: float, _error: Exception | None, _retry_s: float) -> None:
        self.done.put_nowait(key)

    def stood_back(self, _key: Key, _holder: str | None) -> None: ...
    def waiting(self, _deployments: int) -> None: ...
    def lost(self, _kind: Kind, _error: object) -> None: ...
    def changed(self, _key: Key, _changes: object) -> None: ...
    def labelled(self, _pod: Key) -> None: ...


async def test_pods_are_searched_for_a_node_that_changes_and_not_for_each_that_is_listed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    searched = list[Manifest]()

    def searching(pod: Manifest) -> str:
        searched.append(pod)
        return node_name_of(pod)

    monkeypatch.setattr("kvrouter.operator.reconcile.driver.node_name_of", searching)
    cluster, looks = Quiet(), Looks()
    leading = Driver(
        cluster,
        defaults=DEFAULTS,
        identity="one",
        lease=Key("kvrouter-system", "kvrouter-operator"),
        namespace="",
        listener=looks,
    )
    task = asyncio.create_task(leading.run())
    cluster.nodes_may_come.set()
    await cluster.relabelled.wait()
    assert searched == THERE[PODS]
    assert await looks.done.get() == Key("team", "llm")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

"""What a watcher of objects makes of an API server that follows a script."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from kvrouter.core.backoff import Failures
from kvrouter.core.workers import WorkerCard
from kvrouter.kube import informer
from kvrouter.kube.account import Account
from kvrouter.kube.client import ClusterLost, RequestRefused
from kvrouter.kube.informer import ListAndWatch, wait_after
from kvrouter.kube.objects import WORKERS, WatchEvent
from kvrouter.transports.records.card_tracker import WatcherSinks
from kvrouter.transports.records.encoding import CARDS, CardRecord
from kvrouter.transports.records.kubernetes import store
from kvrouter.transports.records.kubernetes.cards import WorkerObjects
from kvrouter.transports.records.kubernetes.objects import StoredObject, encode_object
from kvrouter.transports.records.kubernetes.store import QUIET_LEASES, ObjectVersion
from kvrouter.transports.records.leased_watch import LeasedWatch
from kvrouter.transports.records.port import Gone
from kvrouter.transports.records.store import VersionConflict
from tests.testing.constants import SetConstants
from tests.testing.discovery_stores import DiscoveryRecorder, card
from tests.testing.waits import until

FLEET = "space"
LONG_S = 60.0
FORBIDDEN = RequestRefused("cannot watch", status=403, reason="Forbidden")
GONE = RequestRefused("too old resource version", status=410, reason="Expired")
News = list[WatchEvent] | Exception | None
"""Events, what breaks the watch, or its end."""


class ScriptedApi(WorkerObjects):
    """Keeps objects in a dictionary, and tells open watches what it is reported to."""

    def __init__(self) -> None:
        self.troubles: list[tuple[str, str]] = []
        super().__init__(
            Account("https://nowhere", Path(), "default"),
            fleet=FLEET,
            lease_s=LONG_S,
            on_refused=lambda *refusal: self.troubles.append(refusal),
            pod=None,
        )
        self.objects: dict[str, StoredObject] = {}
        self.version = 100
        self.lists = 0
        self.began_at: list[str] = []
        self.deleted: list[tuple[str, str]] = []
        self.refuses_lists: Exception | None = None
        self.refuses_watches: Exception | None = None
        self._news: asyncio.Queue[News] = asyncio.Queue(1000)

    async def everything(self) -> tuple[list[StoredObject], str]:
        self.lists += 1
        if self.refuses_lists is not None:
            raise self.refuses_lists
        return list(self.objects.values()), str(self.version)

    @asynccontextmanager
    async def watch(self, version: str) -> AsyncIterator[AsyncIterator[list[WatchEvent]]]:
        if self.refuses_watches is not None:
            raise self.refuses_watches
        self.began_at.append(version)
        self._news = asyncio.Queue(1000)
        yield self._stream(self._news)

    async def delete(self, key: str, version: ObjectVersion | None = None) -> None:
        assert version is not None
        self.deleted.append((key, version.version))
        if self.objects[self.name_of(key)].metadata.resource_version != version.version:
            raise VersionConflict("another version")
        del self.objects[self.name_of(key)]

    def write(self, worker: WorkerCard, *, lease_s: float = LONG_S, withdrawn: bool = False) -> WatchEvent:
        """Keep a card, and return the event of it, which nobody is notified yet."""
        self.version += 1
        name = self.name_of(str(worker.worker_id))
        spec = CARDS.encode(CardRecord(worker, lease_s, withdrawn=withdrawn))
        made = json.loads(encode_object(WORKERS, name, spec, fleet=FLEET))
        made["metadata"] |= {"resourceVersion": str(self.version), "uid": f"uid of {name}"}
        text = json.dumps(made).encode()
        self.objects[name] = msgspec.json.decode(text, type=StoredObject)
        return WatchEvent("MODIFIED", msgspec.Raw(text))

    def bookmark(self) -> WatchEvent:
        """An event that tells a version and nothing else."""
        self.version += 1
        text = json.dumps(
            {"apiVersion": "v", "kind": "k", "metadata": {"resourceVersion": str(self.version)}}
        )
        return WatchEvent("BOOKMARK", msgspec.Raw(text.encode()))

    def tell(self, news: News) -> None:
        """Tell the open watch."""
        self._news.put_nowait(news)

    async def _stream(self, news: asyncio.Queue[News]) -> AsyncIterator[list[WatchEvent]]:
        while (reported := await news.get()) is not None:
            if isinstance(reported, Exception):
                raise reported
            yield reported


@dataclass
class Scene:
    """A scripted API server, and one who watches it."""

    api: ScriptedApi = field(default_factory=ScriptedApi)
    recorder: DiscoveryRecorder = field(default_factory=DiscoveryRecorder)
    _watches: list[LeasedWatch[ObjectVersion]] = field(default_factory=list)

    @property
    def troubles(self) -> list[tuple[str, str]]:
        return self.api.troubles

    async def listen(self, *, quiet_s: float = LONG_S, remove_after_s: float = LONG_S) -> None:
        self.api.lease_s = quiet_s / QUIET_LEASES
        watch = LeasedWatch(
            self.api,
            WatcherSinks(self.recorder.add, self.recorder.gone, self.recorder.store),
            remove_after_s=remove_after_s,
            on_trouble=lambda *trouble: self.troubles.append(trouble),
        )
        self._watches.append(watch)
        await watch.feed.start()

    async def end(self) -> None:
        for watch in self._watches:
            watch.end()
            await watch.feed.ended()


@pytest.fixture
async def scene(set_constants: SetConstants) -> AsyncIterator[Scene]:
    set_constants(store, TICK_MAX_S=0.02)
    made = Scene()
    yield made
    await made.end()


async def test_expired_watch_lists_again_and_loses_or_repeats_no_worker(scene: Scene) -> None:
    scene.api.write(card(1))
    await scene.listen()
    scene.api.tell([scene.api.write(card(2))])
    await scene.recorder.until_heard(card(1), card(2))
    scene.api.write(card(3))
    scene.api.write(card(1), withdrawn=True)
    scene.api.tell(GONE)
    await scene.recorder.until(lambda: len(scene.recorder.events) >= 4)
    assert scene.recorder.events[:2] == [card(1), card(2)]
    assert set(map(str, scene.recorder.events[2:])) == {str(card(3)), str((1, 9, Gone.WITHDRAWN))}
    assert scene.api.lists == 2


async def test_a_watch_that_ends_goes_on_from_the_last_version_that_it_heard(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ListAndWatch, "lives_least_s", -1.0)
    await scene.listen()
    scene.api.tell([scene.api.write(card(1))])
    scene.api.tell(None)
    await until(lambda: len(scene.api.began_at) == 2)
    scene.api.tell([scene.api.bookmark()])
    scene.api.tell(None)
    await until(lambda: len(scene.api.began_at) == 3)
    assert scene.api.began_at == ["100", "101", "102"]
    assert scene.api.lists == 1
    assert scene.recorder.events == [card(1)]


async def test_watches_that_end_at_once_are_retried_ever_later(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    def no_wait_after(failures: Failures, error: Exception) -> float:
        waits.append(wait_after(failures, error))
        return 0.0

    monkeypatch.setattr(informer, "wait_after", no_wait_after)
    await scene.listen()
    for n_ends in range(1, 9):
        scene.api.tell(None)
        await until(lambda: len(scene.api.began_at) > n_ends)  # noqa: B023
    assert 0.1 <= waits[0] <= 0.15
    assert 5.0 <= waits[-1] <= 7.5
    scene.api.tell([scene.api.write(card(1))])
    await scene.recorder.until_heard(card(1))
    scene.api.tell(None)
    await until(lambda: len(waits) == 9)
    assert waits[-1] <= 0.15


async def test_forbidden_watch_is_reported_once_and_no_worker_is_seen(scene: Scene) -> None:
    scene.api.write(card(1))
    scene.api.refuses_watches = FORBIDDEN
    await scene.listen()
    await until(lambda: scene.api.lists == 3)
    assert scene.recorder.events == [False]
    scene.api.refuses_watches = None
    await scene.recorder.until_heard(False, True, card(1))


async def test_api_server_is_asked_before_a_lease_expires(scene: Scene) -> None:
    scene.api.write(card(1), lease_s=0.3)
    scene.api.write(card(2), lease_s=0.3)
    await scene.listen()
    scene.api.write(card(1), lease_s=LONG_S)  # the watch says nothing of it
    await scene.recorder.until_heard(card(1), card(2), (2, 9, Gone.EXPIRED))
    lists = scene.api.lists
    scene.api.tell(GONE)
    await until(lambda: scene.api.lists > lists)
    assert scene.recorder.events == [card(1), card(2), (2, 9, Gone.EXPIRED)]


async def test_silent_watch_is_checked_by_a_new_list(scene: Scene) -> None:
    scene.api.write(card(1))
    await scene.listen(quiet_s=0.05)
    scene.api.write(card(2))
    await scene.recorder.until_heard(card(1), card(2))
    scene.api.refuses_lists = ClusterLost("the API server did not answer in time")
    await scene.recorder.until_heard(card(1), card(2), False)


async def test_unrenewed_objects_are_deleted_at_the_version_seen(scene: Scene) -> None:
    scene.api.write(card(1), lease_s=0.01)
    scene.api.write(card(2))
    scene.api.write(card(3), lease_s=0.01, withdrawn=True)
    versions = {each.metadata.name: each.metadata.resource_version for each in scene.api.objects.values()}
    await scene.listen(remove_after_s=0.2)
    await until(lambda: len(scene.api.objects) == 1)
    assert list(scene.api.objects) == ["space-2"]
    assert {("1", versions["space-1"]), ("3", versions["space-3"])} <= set(scene.api.deleted)
    assert scene.troubles == []

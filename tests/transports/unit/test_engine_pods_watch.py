"""What follows labelled pods makes of an API server that follows a script."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec
import pytest

from kvrouter.kube.account import Account
from kvrouter.kube.client import ClusterLost, RequestRefused
from kvrouter.kube.informer import ListAndWatch
from kvrouter.kube.objects import WatchEvent
from kvrouter.transports.records.kubernetes import PodsApi, PodsWatch, pods, pods_reason
from tests.testing.constants import SetConstants
from tests.testing.pod_fleet import pod_json
from tests.testing.waits import until

FORBIDDEN = RequestRefused("cannot list", status=403, reason="Forbidden")
EXPIRED = RequestRefused("too old resource version", status=410, reason="Expired")
News = list[WatchEvent] | Exception | None


class ScriptedApi(PodsApi):
    """Keeps pods in a dictionary, and tells the open watch what it is reported to."""

    def __init__(self, *names: str) -> None:
        account = Account("https://nowhere", Path(), "models")
        super().__init__(account, namespace="models", selector="kvrouter.dev/engine", answer_s=1.0)
        self.pods: dict[str, object] = {name: pod_json(name) for name in names}
        self.lists = 0
        self.began_at: list[str] = []
        self.refuses: Exception | None = None
        self._news: asyncio.Queue[News] = asyncio.Queue(100)

    async def everything(self) -> tuple[list[msgspec.Raw], str]:
        self.lists += 1
        if self.refuses is not None:
            raise self.refuses
        return [msgspec.Raw(json.dumps(each).encode()) for each in self.pods.values()], "100"

    @asynccontextmanager
    async def watch(self, version: str) -> AsyncIterator[AsyncIterator[list[WatchEvent]]]:
        self.began_at.append(version)
        self._news = asyncio.Queue(100)
        yield self._stream(self._news)

    def tell(self, kind: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK"], given: object) -> None:
        self._news.put_nowait([WatchEvent(kind, msgspec.Raw(json.dumps(given).encode()))])

    def ends(self, how: Exception | None) -> None:
        self._news.put_nowait(how)

    async def _stream(self, news: asyncio.Queue[News]) -> AsyncIterator[list[WatchEvent]]:
        while (reported := await news.get()) is not None:
            if isinstance(reported, Exception):
                raise reported
            yield reported


def ended(name: str) -> dict[str, object]:
    """A pod that was evicted, say."""
    given = pod_json(name)
    return given | {"status": given["status"] | {"phase": "Failed"}}


@dataclass
class Scene:
    """What is heard of a scripted API server."""

    api: ScriptedApi
    there: set[str] = field(default_factory=set)
    gone: list[str] = field(default_factory=list)
    stores: list[tuple[bool, str]] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)

    def on_gone(self, uid: str) -> None:
        self.gone.append(uid.removeprefix("uid of "))
        self.there.discard(self.gone[-1])


@asynccontextmanager
async def scene(api: ScriptedApi, *, pods_max: int = 10) -> AsyncIterator[Scene]:
    made = Scene(api)
    watch = PodsWatch(
        api,
        on_pod=lambda pod: made.there.add(pod.name),
        on_gone=made.on_gone,
        on_store=lambda *reported: made.stores.append(reported),
        on_refused=lambda *reported: made.refused.append(reported),
        pods_max=pods_max,
    )
    await watch.start()
    yield made
    watch.end()
    await watch.ended()


async def test_pods_are_followed_as_they_are_added_and_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ListAndWatch, "lives_least_s", -1.0)
    async with scene(ScriptedApi("a", "b")) as made:
        assert made.there == {"a", "b"}
        made.api.tell("ADDED", pod_json("c", more={"resourceVersion": "101"}))
        made.api.tell("DELETED", pod_json("a", more={"resourceVersion": "102"}))
        made.api.tell("BOOKMARK", {"metadata": {"resourceVersion": "110"}})
        made.api.ends(None)
        await until(lambda: len(made.api.began_at) == 2)
        assert (made.there, made.gone, made.api.lists) == ({"b", "c"}, ["a"], 1)
        assert made.api.began_at == ["100", "110"]


async def test_pod_missing_from_the_next_list_is_reported_gone() -> None:
    async with scene(ScriptedApi("a", "b")) as made:
        made.api.pods = {"b": pod_json("b"), "c": pod_json("c")}
        made.api.ends(EXPIRED)
        await until(lambda: made.there == {"b", "c"})
        assert (made.gone, made.stores) == (["a"], [])


async def test_lost_api_server_is_reported_once_and_removes_no_pod() -> None:
    async with scene(ScriptedApi("a")) as made:
        made.api.refuses = FORBIDDEN
        made.api.ends(EXPIRED)
        await until(lambda: made.api.lists >= 3)
        ((is_reachable, why),) = made.stores
        assert (is_reachable, "bind a Role with list and watch on pods" in why) == (False, True)
        assert (made.there, made.gone) == ({"a"}, [])
        made.api.refuses = None
        await until(lambda: made.stores[1:] == [(True, "")])


async def test_pod_watch_started_without_an_api_server_waits_for_it() -> None:
    api = ScriptedApi("a")
    api.refuses = ClusterLost("the API server did not answer in time")
    async with scene(api) as made:
        assert made.stores == [(False, "the API server did not answer in time")]
        api.refuses = None
        await until(lambda: made.there == {"a"})


async def test_list_with_an_unreadable_pod_removes_no_pod() -> None:
    async with scene(ScriptedApi("a")) as made:
        made.api.pods = {"x": {"metadata": {"name": 7}}}
        made.api.ends(EXPIRED)
        await until(lambda: made.refused != [])
        assert (made.there, made.gone) == ({"a"}, [])
        made.api.pods = {}
        made.api.ends(EXPIRED)
        await until(lambda: made.gone == ["a"])


async def test_pods_over_the_limit_are_reported_and_added_when_others_leave(
    set_constants: SetConstants,
) -> None:
    set_constants(pods, TICK_S=0.01)
    async with scene(ScriptedApi("a", "b", "c"), pods_max=2) as made:
        assert made.there == {"a", "b"}
        assert made.refused == [("pod c", "more than 2 pods are labelled as engines")]
        del made.api.pods["a"]
        made.api.tell("DELETED", pod_json("a"))
        await until(lambda: made.there == {"b", "c"})


async def test_ended_pods_do_not_count_toward_the_limit(set_constants: SetConstants) -> None:
    set_constants(pods, TICK_S=0.01)
    api = ScriptedApi("a", "b", "c")
    api.pods["a"] = ended("a")
    async with scene(api, pods_max=2) as made:
        assert (made.there, made.refused) == ({"b", "c"}, [])
        made.api.pods["d"] = pod_json("d")
        made.api.tell("ADDED", pod_json("d"))
        made.api.pods["b"] = ended("b")
        made.api.tell("MODIFIED", ended("b"))
        await until(lambda: made.there == {"c", "d"})
        assert made.gone == ["b"]


async def test_silent_watch_is_checked_by_a_new_list(set_constants: SetConstants) -> None:
    set_constants(pods, TICK_S=0.01, QUIET_S=0.02)
    async with scene(ScriptedApi("a")) as made:
        made.api.pods["b"] = pod_json("b")
        await until(lambda: made.there == {"a", "b"})


def test_api_server_error_is_reported_with_its_fix() -> None:
    assert "bind a Role with create on events" in pods_reason(FORBIDDEN, needs="create on events")
    assert "bind a Role" in pods_reason(FORBIDDEN)
    assert pods_reason(EXPIRED) == "the API server says 410 Expired: too old resource version"

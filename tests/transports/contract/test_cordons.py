"""Every store of cordons keeps the laws of the port."""

import asyncio
import secrets
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import nats
import pytest

from kvrouter.core.cordon_rules import Cordon, CordonSource
from kvrouter.core.errors import CordonsUnavailable
from kvrouter.transports.records import clusters
from kvrouter.transports.records.clusters import ClustersCordons
from kvrouter.transports.records.encoding import CORDONS
from kvrouter.transports.records.file import FileCordons, FileDiscovery
from kvrouter.transports.records.file import cordons as cordons_of_files
from kvrouter.transports.records.file.folder import MARKER, Folder
from kvrouter.transports.records.memory import MemoryCordons
from kvrouter.transports.records.nats import NatsCordons
from kvrouter.transports.records.nats import cordons as cordons_of_nats
from kvrouter.transports.records.port import CordonStore
from tests.testing.constants import SetConstants
from tests.testing.cordon_laws import ZONE, CordonLaws
from tests.testing.discovery_stores import card, ignore_reports
from tests.testing.nats_server import NatsServer
from tests.testing.processes import eventually
from tests.testing.waits import until

End = Callable[[], CordonStore]


class TestEveryStore(CordonLaws):
    """All stores without an API server."""

    @pytest.fixture(params=["memory", "file", "clusters", "nats"])
    async def end(self, request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[End]:
        if request.param == "memory":
            only = MemoryCordons()
            yield lambda: only
        elif request.param == "nats":
            server: NatsServer = request.getfixturevalue("shared_nats")
            namespace = f"test-{secrets.token_hex(8)}"
            clients = [await nats.connect(server.url) for _ in range(2)]
            turn = iter(range(1000))
            yield lambda: NatsCordons(
                clients[next(turn) % 2], namespace=namespace, token="t0p", on_refused=ignore_reports
            )
            for client in clients:
                await client.close()
        else:

            def file_end() -> CordonStore:
                own = FileCordons(tmp_path / "cards", namespace="space", on_refused=ignore_reports)
                if request.param == "file":
                    return own
                return ClustersCordons({"here": own, "there": MemoryCordons()}, on_refused=ignore_reports)

            yield file_end


class Refusals:
    """What a store refused, each once."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, str]] = []

    def __call__(self, what: str, why: str) -> None:
        self.heard.append((what, why))


async def test_calls_to_an_unusable_cordon_directory_fail_and_change_nothing(tmp_path: Path) -> None:
    store = FileCordons(tmp_path / "cards", namespace="space", on_refused=ignore_reports)
    await store.put(ZONE)
    (tmp_path / "cards").rename(tmp_path / "aside")
    (tmp_path / "cards").write_text("in the way")
    for ask in (store.read(), store.put(Cordon("zone", "b")), store.remove(ZONE)):
        with pytest.raises(CordonsUnavailable, match="cards"):
            await ask
    (tmp_path / "cards").unlink()
    (tmp_path / "aside").rename(tmp_path / "cards")
    assert await store.read() == (ZONE,)


async def test_file_without_a_cordon_is_reported_once_and_other_cordons_are_read(tmp_path: Path) -> None:
    refused = Refusals()
    store = FileCordons(tmp_path / "cards", namespace="space", on_refused=refused)
    await store.put(ZONE)
    (good,) = (tmp_path / "cards" / "space").glob("cordon-*.json")
    bad = good.with_name(f"cordon-{'0' * 32}.json")
    for content, why in (
        (b"{", "cordon: "),
        (good.read_bytes(), "holds the cordon of zone a"),
        (b"x" * 20_000, "more"),
    ):
        bad.write_bytes(content)
        assert await store.read() == (ZONE,)
        assert await store.read() == (ZONE,)
        what, said = refused.heard.pop()
        assert (what, refused.heard) == (str(bad), [])
        assert why in said
        bad.unlink()
        store = FileCordons(tmp_path / "cards", namespace="space", on_refused=refused)


async def test_removing_a_cordon_deletes_its_corrupt_file(tmp_path: Path) -> None:
    store = FileCordons(tmp_path / "cards", namespace="space", on_refused=ignore_reports)
    await store.put(ZONE)
    (bad,) = (tmp_path / "cards" / "space").glob("cordon-*.json")
    bad.write_bytes(b"{")
    await store.remove(ZONE)
    assert not bad.exists()


async def test_removing_expired_cards_keeps_cordons(tmp_path: Path) -> None:
    troubles = Refusals()
    store = FileCordons(tmp_path / "cards", namespace="space", on_refused=ignore_reports)
    await store.put(ZONE)
    discovery = FileDiscovery(
        tmp_path / "cards",
        namespace="space",
        on_trouble=ignore_reports,
        on_refused=troubles,
        lease_s=0.1,
        poll_s=0.01,
        remove_after_s=0.2,
    )
    gone = asyncio.Event()
    end = await discovery.watch(lambda _: None, lambda *_: gone.set())
    other = FileDiscovery(
        tmp_path / "cards",
        namespace="space",
        on_trouble=ignore_reports,
        on_refused=ignore_reports,
        lease_s=0.1,
        poll_s=0.01,
    )
    await other.publish(card())
    await other.close()
    async with asyncio.timeout(60):
        await gone.wait()
    await until(lambda: not any((tmp_path / "cards" / "space").glob("worker-*")))
    end()
    await discovery.close()
    assert await store.read() == (ZONE,)
    assert troubles.heard == [], "a cordon is no card, and no stranger"
    (tmp_path / "cards" / MARKER).unlink()
    await store.put(Cordon("zone", "b"))
    assert len(await store.read()) == 2, "without its marker the directory is known by its cordons"


async def test_calls_to_a_hanging_directory_fail_in_time_and_share_one_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, set_constants: SetConstants
) -> None:
    set_constants(cordons_of_files, ANSWER_S=0.05)
    store = FileCordons(tmp_path / "cards", namespace="space", on_refused=ignore_reports)
    await store.put(ZONE)
    assert await store.read() == (ZONE,)
    threads = threading.active_count()
    hangs = threading.Event()
    check = Folder.check
    monkeypatch.setattr(Folder, "check", lambda self: hangs.wait(60) and check(self))
    for why in ("did not answer within", *("does not answer",) * 20):
        with pytest.raises(CordonsUnavailable, match=why):
            await store.read()
    assert threading.active_count() <= threads
    hangs.set()

    async def is_back() -> bool:
        try:
            return await store.read() == (ZONE,)
        except CordonsUnavailable:
            return False

    await eventually(is_back)


async def test_deletion_markers_do_not_hide_cordons_in_nats(
    shared_nats: NatsServer, set_constants: SetConstants
) -> None:
    set_constants(cordons_of_nats, CORDONS=replace(CORDONS, records_max=4))
    client = await nats.connect(shared_nats.url)
    store = NatsCordons(
        client, namespace=f"test-{secrets.token_hex(8)}", token="t0p", on_refused=ignore_reports
    )
    kept = {Cordon("zone", name) for name in "abc"}
    for cordon in (*(Cordon("worker", str(number)) for number in range(12)), *kept):
        await store.put(cordon)
        if cordon not in kept:
            await store.remove(cordon)
    assert set(await store.read()) == kept
    await client.close()


class Silent(MemoryCordons):
    """A store that answers when it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = asyncio.Event()

    async def read(self) -> tuple[Cordon, ...]:
        await self.answers.wait()
        return await super().read()


async def test_reading_cordons_does_not_wait_for_a_silent_cluster(set_constants: SetConstants) -> None:
    set_constants(clusters, OTHERS_WITHIN_S=0.05)
    here, there = MemoryCordons(), Silent()
    await there.put(Cordon("node", "n1"))
    await here.put(ZONE)
    both = ClustersCordons({"here": here, "there": there}, on_refused=ignore_reports)
    assert await both.read() == (ZONE,)
    set_constants(clusters, OTHERS_WITHIN_S=3600.0)
    assert await both.read() == (ZONE,), "it is not waited for again"
    there.answers.set()

    async def is_heard() -> bool:
        return len(await both.read()) == 2

    await eventually(is_heard)


async def test_nats_cordon_of_another_token_is_ignored_and_reported_once(shared_nats: NatsServer) -> None:
    client = await nats.connect(shared_nats.url)
    namespace, refused = f"test-{secrets.token_hex(8)}", Refusals()
    mine = NatsCordons(client, namespace=namespace, token="mine", on_refused=refused)
    other = NatsCordons(client, namespace=namespace, token="other", on_refused=ignore_reports)
    await other.put(ZONE)
    assert await mine.read() == ()
    assert await mine.read() == ()
    ((what, why),) = refused.heard
    assert namespace in what
    assert "KVROUTER_PLANE_TOKEN" in why
    await client.close()


async def test_cordon_calls_fail_while_nats_is_down(own_nats: NatsServer) -> None:
    back = asyncio.Event()

    async def is_back() -> None:
        back.set()

    client = await nats.connect(
        own_nats.url, max_reconnect_attempts=-1, reconnect_time_wait=0.05, reconnected_cb=is_back
    )
    store = NatsCordons(client, namespace="space", token="t", on_refused=ignore_reports)
    await store.put(ZONE)
    own_nats.stop()
    for ask in (store.read(), store.put(Cordon("zone", "b")), store.remove(ZONE)):
        with pytest.raises(CordonsUnavailable, match="kvrouter-space-cordons"):
            await ask
    own_nats.restart()
    async with asyncio.timeout(60):
        await back.wait()
    assert await store.read() == (ZONE,), "and a server that starts again has kept it"
    await client.close()


async def test_cordon_of_another_cluster_is_read_and_kept_while_its_store_fails(tmp_path: Path) -> None:
    here = FileCordons(tmp_path / "here", namespace="space", on_refused=ignore_reports)
    there = FileCordons(tmp_path / "there", namespace="space", on_refused=ignore_reports)
    refused = Refusals()
    both = ClustersCordons({"here": here, "there": there}, on_refused=refused)
    await both.put(ZONE)
    node = Cordon("node", "n1", source=CordonSource.NODE_ANNOTATION)
    await there.put(node)
    assert await here.read() == (ZONE,)
    found = await both.read()
    assert [(each.place, each.cluster) for each in found] == [("zone a", ""), ("node n1", "there")]
    (tmp_path / "there").rename(tmp_path / "aside")
    (tmp_path / "there").write_text("in the way")
    assert await both.read() == found, "what was read last holds"
    assert await both.read() == found
    ((what, _),) = refused.heard
    assert what == "cluster there"

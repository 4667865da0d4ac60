"""The file store: what it reads, what it removes, and who keeps the place of a worker."""

import asyncio
import errno
import os
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO

import pytest

from kvrouter.core.errors import ConfigError
from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.transports.records import leased_watch
from kvrouter.transports.records.card_tracker import TroubleSink, WatcherSinks
from kvrouter.transports.records.encoding import CARDS, RECORD_MAX_BYTES, CardRecord, encode_record
from kvrouter.transports.records.file.folder import Folder
from kvrouter.transports.records.file.store import FileRecords
from kvrouter.transports.records.leased_watch import LeasedWatch
from kvrouter.transports.records.port import Gone
from kvrouter.transports.records.store import PolledFeed, RecordKind
from tests.testing.calls import MakeFail
from tests.testing.constants import SetConstants
from tests.testing.discovery_stores import (
    SHORT_LEASE_S,
    FileStore,
    card,
    file_store,
    ignore_reports,
    record_discovery,
)
from tests.testing.waits import until

LEASE_S = 10.0


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[FileStore]:
    async with file_store(tmp_path) as made:
        yield made


@pytest.fixture
def refused() -> list[tuple[str, str]]:
    """What the store of the test refused."""
    return []


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    made = Folder(tmp_path / "cards", "space")
    made.open()
    return made


@pytest.fixture
def files(folder: Folder, refused: list[tuple[str, str]]) -> Iterator[FileRecords[CardRecord]]:
    made = files_of(folder, lambda *refusal: refused.append(refusal))
    yield made
    made._reading.close()
    made._writing.close()


def files_of(
    folder: Folder, on_refused: TroubleSink = ignore_reports, *, kind: RecordKind[CardRecord] = CARDS
) -> FileRecords[CardRecord]:
    return FileRecords(
        kind,
        folder,
        is_host=True,
        what="the directory",
        answer_s=60.0,
        half_stays_s=0.0,
        on_refused=on_refused,
    )


def record(worker_id: int, incarnation: int = 9, *, draining: bool = False) -> CardRecord:
    return CardRecord(card(worker_id, incarnation, draining=draining), LEASE_S)


async def ids(files: FileRecords[CardRecord]) -> list[int]:
    return [each.value.card.worker_id for each in await files.list_all()]


# What it reads


def strangers(folder: Folder) -> dict[str, Path]:
    """Lay everything in the folder that is no card."""
    whole = encode_record(CardRecord(card(2), LEASE_S))
    contents = {
        "notes.txt": b"hello",
        "worker-01.json": whole,
        "worker-99999999999999999999.json": whole,
        "worker-2.json": whole[:40],
        "worker-3.json": whole,
        "worker-4.json": b"\xff\x00" * 100,
        "worker-5.json": b" " * (RECORD_MAX_BYTES + 1),
        "worker-6.json": encode_record(CardRecord(card(6), -1.0)),
        "worker-10.json": b"[" * 100_000,
    }
    for name, content in contents.items():
        (folder.path / name).write_bytes(content)
    (folder.path / "worker-7.json").mkdir()
    (folder.path / "worker-8.json").symlink_to(folder.path / "worker-3.json")
    os.mkfifo(folder.path / "worker-9.json")
    return {path.name: path for path in folder.path.iterdir()}


async def test_files_that_are_not_cards_are_reported_once_and_kept(
    folder: Folder, files: FileRecords[CardRecord], refused: list[tuple[str, str]]
) -> None:
    await files.put(record(1))
    laid = strangers(folder).keys() - {"worker-1.json"}
    for _ in range(2):
        assert await ids(files) == [1]
    assert sorted(Path(what).name for what, _ in refused) == sorted(laid)
    assert all(why for _, why in refused)
    assert laid <= {path.name for path in folder.path.iterdir()}


async def test_bad_file_removed_and_created_again_is_reported_again(
    folder: Folder, files: FileRecords[CardRecord], refused: list[tuple[str, str]]
) -> None:
    for n_reported in (1, 2):
        (folder.path / "notes.txt").write_text("hello")
        await files.list_all()
        (folder.path / "notes.txt").unlink()
        await files.list_all()
        assert len(refused) == n_reported


async def test_card_file_of_another_user_is_refused(
    folder: Folder,
    files: FileRecords[CardRecord],
    refused: list[tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await files.put(record(1))
    monkeypatch.setattr(folder, "check", lambda: None)
    monkeypatch.setattr(os, "geteuid", lambda: folder.path.stat().st_uid + 1)
    assert await files.list_all() == []
    assert len(refused) == 1


async def test_no_more_files_than_the_limit_are_looked_at(
    folder: Folder, refused: list[tuple[str, str]]
) -> None:
    for number in range(55):
        (folder.path / f".worker-{number}.{number:016x}.half").touch()
    few = files_of(folder, lambda *refusal: refused.append(refusal), kind=replace(CARDS, records_max=50))
    for _ in range(2):
        await few.list_all()
    assert [why for _, why in refused] == ["more than 50 files: the others are not looked at"]
    await few.close()


async def test_worker_over_the_limit_is_reported_and_joins_when_there_is_room(
    store: FileStore, set_constants: SetConstants
) -> None:
    set_constants(leased_watch, WORKERS_MAX=1)
    first, second = store.end(lease_s=SHORT_LEASE_S), store.end()
    await first.publish(card(1))
    await second.publish(card(2))
    recorder = await record_discovery(store.end())
    assert recorder.events == [card(1)]
    await until(lambda: bool(store.refusals))
    await first.close()
    (store.directory / "space" / "worker-1.json").unlink()
    await recorder.until_heard(card(1), (1, 9, Gone.EXPIRED), card(2))
    assert store.refusals == [(str(store.directory / "space" / "worker-2.json"), "more than 1 workers")]


async def test_worker_overwrites_a_file_of_its_name_that_is_not_a_card(store: FileStore) -> None:
    (store.directory / "space").mkdir(parents=True, mode=0o700)
    (store.directory / "space" / "worker-1.json").write_text("{")
    recorder = await record_discovery(store.end())
    await store.end().publish(card())
    await recorder.until_heard(card())
    assert [what for what, _ in store.refusals] == [str(store.directory / "space" / "worker-1.json")]


async def test_two_watches_of_a_process_report_a_bad_file_once(store: FileStore) -> None:
    end = store.end()
    ears = [await record_discovery(end), await record_discovery(end)]
    (store.directory / "space" / "notes.txt").write_text("hello")
    (store.directory / "space" / "worker-7.json").write_text("{")
    await store.end().publish(card())
    for recorder in ears:
        await recorder.until_heard(card())
    assert sorted(Path(what).name for what, _ in store.refusals) == ["notes.txt", "worker-7.json"]
    assert store.troubles == []


# What it removes


async def test_files_of_workers_that_do_not_renew_are_removed(
    folder: Folder, files: FileRecords[CardRecord]
) -> None:
    for worker_id in (1, 2, 3):
        await files.put(record(worker_id))
    (folder.path / ".worker-4.0123456789abcdef.half").touch()
    watch = LeasedWatch(
        files,
        WatcherSinks(ignore_reports, ignore_reports, None),
        remove_after_s=0.0,
        on_trouble=ignore_reports,
    )
    assert isinstance(watch.feed, PolledFeed)
    await watch.feed.poll()
    lives, version = await files.read("1")
    assert lives is not None
    version = await files.put_over(lives, version)
    await watch.tidy(time.monotonic() + 11 * LEASE_S)
    assert await ids(files) == [1], "one that was renewed since the last look is let alone"
    assert {path.name for path in folder.path.iterdir()} == {"worker-1.json"}
    await files.put_over(lives, version)
    await files.put_over(record(2), None)
    assert await ids(files) == [1, 2]


def raises(code: int) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


async def test_folder_with_inaccessible_files_is_a_lost_store(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.end().publish(card())
    recorder = await record_discovery(store.end())
    with monkeypatch.context() as folder:
        folder.setattr(Path, "lstat", raises(errno.EACCES))
        await recorder.until_heard(card(), False)
    await recorder.until_heard(card(), False, True)


# Who keeps the place


async def test_each_renewal_has_a_new_stamp_when_the_wall_clock_goes_back(
    files: FileRecords[CardRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    version = await files.put_over(record(1), None)
    clock = iter(range(10**18, 0, -(10**12)))
    monkeypatch.setattr("kvrouter.transports.records.file.folder.time.time_ns", lambda: next(clock))
    stamps = set()
    for _ in range(10):
        version = await files.put_over(record(1), version)
        stamps |= {each.version for each in await files.list_all()}
    assert len(stamps) == 10


async def test_exactly_one_of_two_simultaneous_starts_keeps_the_file(store: FileStore) -> None:
    lost: list[Epoch] = []
    starts = [Epoch(9), Epoch(2)]
    ends = [
        store.end(on_lost=lambda _id, incarnation, _why: lost.append(incarnation), lease_s=SHORT_LEASE_S)
        for _ in starts
    ]
    await ends[0].publish(card(1, starts[0]))
    (store.directory / "space" / "worker-1.json").unlink()
    await ends[1].publish(card(1, starts[1]))
    await until(lambda: bool(lost))
    recorder = await record_discovery(store.end())
    (winner,) = set(starts) - set(lost)
    assert recorder.events == [card(1, winner)]


async def test_replaced_worker_reports_the_replacement_once(store: FileStore) -> None:
    old = store.end(lease_s=SHORT_LEASE_S)
    await old.publish(card())
    await store.end().publish(card(1, 2))
    recorder = await record_discovery(store.end())
    await until(lambda: bool(store.troubles))
    assert store.troubles == [("worker 1", "replaced by a newer start of the same id")]
    await old.close()
    assert recorder.events == [card(1, 2)]


async def test_removed_card_file_is_written_again(store: FileStore) -> None:
    await store.end(lease_s=SHORT_LEASE_S).publish(card())
    recorder = await record_discovery(store.end())
    file = store.directory / "space" / "worker-1.json"
    file.unlink()
    await until(file.exists)
    assert recorder.events == [card()]


async def test_card_update_that_cannot_be_written_is_written_later(store: FileStore) -> None:
    end = store.end()
    await end.publish(card())
    recorder = await record_discovery(store.end())
    await store.lose()
    await recorder.until_heard(card(), False)
    await end.publish(card(draining=True))
    assert [what for what, _ in store.troubles] == ["worker 1"]
    await store.bring_back(is_empty=False)
    await recorder.until_heard(card(), False, True, card(draining=True))


async def test_full_disk_is_reported_with_the_file_and_the_update_written_later(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    end, fdopen = store.end(), os.fdopen
    await end.publish(card())
    recorder = await record_discovery(store.end())

    def on_a_full_disk(file: int, mode: str) -> IO[bytes]:
        if mode != "wb":
            return fdopen(file, "rb")
        os.close(file)
        return Path("/dev/full").open("wb")

    with monkeypatch.context() as disk:
        disk.setattr(os, "fdopen", on_a_full_disk)
        with pytest.raises(ConfigError, match=r"No space left on device: .*worker-2"):
            await store.end().publish(card(2))
        await end.publish(card(draining=True))
    [(what, why)] = store.troubles
    assert what == "worker 1"
    assert re.search(r"cannot be written: .*No space left on device: .*worker-1", why)
    await recorder.until_heard(card(), card(draining=True))


async def test_changed_card_that_cannot_be_written_still_renews_its_lease(
    folder: Folder, files: FileRecords[CardRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk takes no new file, and a worker that is alive does not lapse for that."""
    version = await files.put_over(record(1), None)
    with monkeypatch.context() as disk:
        disk.setattr(folder, "replace", raises(errno.ENOSPC))
        with pytest.raises(OSError, match="No space left"):
            await files.put_over(record(1, draining=True), version)
        (after,) = await files.list_all()
        assert after.value == record(1)
        assert after.version != version, "a renewal is a stamp that differs"
        with pytest.raises(OSError, match="No space left"):
            await files.put_over(record(1, 10), after.version)
        assert [each.version for each in await files.list_all()] == [after.version], "not of another start"
    await files.put_over(record(1, draining=True), after.version)
    assert [each.value for each in await files.list_all()] == [record(1, draining=True)]


async def test_write_error_of_a_card_is_raised_when_renewal_fails_too(
    folder: Folder, files: FileRecords[CardRecord], make_fail: MakeFail
) -> None:
    version = await files.put_over(record(1), None)
    make_fail(folder, "replace", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    make_fail(os, "utime", OSError(errno.EROFS, os.strerror(errno.EROFS)))
    with pytest.raises(OSError, match="No space left"):
        await files.put_over(record(1, draining=True), version)


async def test_withdrawal_that_cannot_be_written_lets_the_lease_expire(store: FileStore) -> None:
    end = store.end(lease_s=SHORT_LEASE_S)
    await end.publish(card())
    recorder = await record_discovery(store.end())
    await store.lose()
    await recorder.until_heard(card(), False)
    await end.withdraw(WorkerId(1), card().incarnation)
    assert [what for what, _ in store.troubles] == ["worker 1"]
    await store.bring_back(is_empty=False)
    await recorder.until_heard(card(), False, True, (1, 9, Gone.EXPIRED))


async def test_exception_in_a_sink_does_not_end_the_watch(store: FileStore) -> None:
    raised: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: raised.append(context["exception"]))

    def refuse(_: object) -> None:
        raise ArithmeticError("a mistake")

    end = store.end()
    await end.watch(refuse, lambda *_: None)
    await end.publish(card(1))
    recorder = await record_discovery(end)
    await end.publish(card(2))
    await recorder.until_heard(card(1), card(2))
    assert {type(each) for each in raised} == {ArithmeticError}

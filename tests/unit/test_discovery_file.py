"""The file store: what it reads, what it removes, and who keeps the place of a worker."""

import asyncio
import errno
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import IO

import pytest

from kvrouter.core.errors import ConfigError
from kvrouter.core.ids import WorkerId
from kvrouter.transports.discovery.file.folder import UNWRITTEN, Folder, HeldCard, Scanner
from kvrouter.transports.discovery.port import Gone
from kvrouter.transports.discovery.wire import RECORD_MAX_BYTES, CardRecord, encode_record
from tests.support.discovery_stores import FileStore, card, file_store, listen
from tests.support.waits import until

LEASE_S = 10.0
FOR_EVER_S = 1e9


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[FileStore]:
    async with file_store(tmp_path) as made:
        yield made


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    made = Folder(tmp_path / "cards", "space")
    made.open()
    return made


def put(folder: Folder, worker_id: int, incarnation: int = 9) -> HeldCard:
    held = folder.put(card(worker_id, incarnation), LEASE_S)
    assert held is not None
    return held


def renewed(folder: Folder, held: HeldCard) -> HeldCard:
    kept = folder.renew(held)
    assert isinstance(kept, HeldCard)
    return kept


def ids(scanner: Scanner) -> list[int]:
    return [record.card.worker_id for record, _ in scanner.look().records]


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


def test_what_is_no_card_is_reported_once_and_let_alone(folder: Folder) -> None:
    put(folder, 1)
    laid = strangers(folder).keys() - {"worker-1.json"}
    scanner = Scanner(folder, remove_after_s=0.0)
    first = scanner.look()
    assert [record.card.worker_id for record, _ in first.records] == [1]
    assert {Path(what).name for what, _ in first.troubles} == laid
    assert all(why for _, why in first.troubles)
    assert scanner.look().troubles == []
    assert laid <= {path.name for path in folder.path.iterdir()}


def test_what_was_removed_and_is_laid_again_is_reported_again(folder: Folder) -> None:
    scanner = Scanner(folder, remove_after_s=FOR_EVER_S)
    for _ in range(2):
        (folder.path / "notes.txt").write_text("hello")
        assert len(scanner.look().troubles) == 1
        (folder.path / "notes.txt").unlink()
        assert scanner.look().troubles == []


def test_a_file_of_another_user_is_no_card(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    put(folder, 1)
    monkeypatch.setattr(folder, "check", lambda: None)
    monkeypatch.setattr(os, "geteuid", lambda: folder.path.stat().st_uid + 1)
    seen = Scanner(folder, remove_after_s=FOR_EVER_S).look()
    assert seen.records == []
    assert len(seen.troubles) == 1


def test_no_more_files_than_the_limit_are_looked_at(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrouter.transports.discovery.file.folder.FILES_MAX", 50)
    for number in range(55):
        (folder.path / f".worker-{number}.{number:016x}.half").touch()
    scanner = Scanner(folder, remove_after_s=FOR_EVER_S)
    assert [why for _, why in scanner.look().troubles] == ["more than 50 files: the others are not looked at"]
    assert scanner.look().troubles == []


async def test_a_worker_takes_its_name_back_from_a_file_that_is_no_card(store: FileStore) -> None:
    (store.directory / "space").mkdir(parents=True, mode=0o700)
    (store.directory / "space" / "worker-1.json").write_text("{")
    ear = await listen(store.end())
    await store.end().publish(card())
    await ear.until_heard(card())
    assert [what for what, _ in store.refusals] == [str(store.directory / "space" / "worker-1.json")]


async def test_two_watches_of_a_process_tell_once(store: FileStore) -> None:
    end = store.end()
    ears = [await listen(end), await listen(end)]
    (store.directory / "space" / "notes.txt").write_text("hello")
    (store.directory / "space" / "worker-7.json").write_text("{")
    await store.end().publish(card())
    for ear in ears:
        await ear.until_heard(card())
    assert sorted(Path(what).name for what, _ in store.refusals) == ["notes.txt", "worker-7.json"]
    assert store.troubles == []


# What it removes


def test_the_files_of_those_who_do_not_renew_go_in_the_end(folder: Folder) -> None:
    lives, dead, gone = put(folder, 1), put(folder, 2), put(folder, 3)
    folder.withdraw(gone.record.card.worker_id, gone.record.card.incarnation)
    (folder.path / ".worker-4.0123456789abcdef.half").touch()
    scanner = Scanner(folder, remove_after_s=0.0)
    assert ids(scanner) == [1, 2, 3]
    lives = renewed(folder, lives)
    scanner.look()
    assert {path.name for path in folder.path.iterdir()} == {"worker-1.json"}
    renewed(folder, lives)
    renewed(folder, dead)
    assert ids(scanner) == [1, 2]


def test_a_card_that_is_being_renewed_is_never_removed(folder: Folder) -> None:
    held = put(folder, 1)
    scanner = Scanner(folder, remove_after_s=0.0)
    for _ in range(50):
        assert ids(scanner) == [1]
        held = renewed(folder, held)


# Who keeps the place


def test_each_renewal_is_seen_though_the_wall_clock_stands_or_goes_back(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = put(folder, 1)
    clock = iter(range(10**18, 0, -(10**12)))
    monkeypatch.setattr("kvrouter.transports.discovery.file.folder.time.time_ns", lambda: next(clock))
    scanner = Scanner(folder, remove_after_s=FOR_EVER_S)
    stamps = set()
    for _ in range(10):
        held = renewed(folder, held)
        stamps.add(scanner.look().records[0][1])
    assert len(stamps) == 10


def test_of_two_that_started_at_once_exactly_one_keeps_the_file(folder: Folder) -> None:
    first = put(folder, 1, 9)
    (folder.path / "worker-1.json").unlink()
    second = put(folder, 1, 2)
    kept = renewed(folder, first)
    assert folder.renew(second) is Gone.REPLACED
    renewed(folder, kept)


async def test_a_worker_that_lost_its_place_says_so_once(store: FileStore) -> None:
    old = store.end()
    await old.publish(card())
    await store.end().publish(card(1, 2))
    ear = await listen(store.end())
    await until(lambda: bool(store.troubles))
    assert store.troubles == [("worker 1", "replaced by a newer start of the same id")]
    await old.close()
    assert ear.heard == [card(1, 2)]


async def test_a_card_whose_file_somebody_removed_is_written_again(store: FileStore) -> None:
    await store.end().publish(card())
    ear = await listen(store.end())
    file = store.directory / "space" / "worker-1.json"
    file.unlink()
    await until(file.exists)
    assert ear.heard == [card()]


async def test_an_update_that_cannot_be_written_is_written_later(store: FileStore) -> None:
    end = store.end()
    await end.publish(card())
    ear = await listen(store.end())
    await store.lose()
    await ear.until_heard(card(), False)
    await end.publish(card(draining=True))
    assert [what for what, _ in store.troubles] == ["worker 1"]
    await store.bring_back(is_empty=False)
    await ear.until_heard(card(), False, True, card(draining=True))


async def test_a_full_disk_is_reported_with_the_file_and_what_was_meant_is_written_later(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    end, fdopen = store.end(), os.fdopen
    await end.publish(card())
    ear = await listen(store.end())

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
    await ear.until_heard(card(), card(draining=True))


def test_a_card_that_changed_and_cannot_be_written_keeps_its_lease(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk takes no new file, and a worker that is alive does not lapse for that."""
    scanner = Scanner(folder, remove_after_s=FOR_EVER_S)
    put(folder, 1)
    (before,) = scanner.look().records
    changed = HeldCard(CardRecord(card(1, draining=True), LEASE_S), UNWRITTEN)

    def full(_: CardRecord) -> HeldCard:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as disk:
        disk.setattr(folder, "_write", full)
        with pytest.raises(OSError, match="No space left"):
            folder.renew(changed)
    (after,) = scanner.look().records
    assert after[0] == before[0]
    assert after[1] != before[1], "a renewal is a stamp that differs"
    assert renewed(folder, changed).record.card.draining


def test_a_card_that_cannot_be_written_is_reported_also_where_its_lease_cannot_be_renewed(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(folder, 1)
    changed = HeldCard(CardRecord(card(1, draining=True), LEASE_S), UNWRITTEN)

    def full(_: CardRecord) -> HeldCard:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def read_only(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(folder, "_write", full)
    monkeypatch.setattr(os, "utime", read_only)
    with pytest.raises(OSError, match="No space left"):
        folder.renew(changed)


async def test_a_goodbye_that_cannot_be_written_is_a_lease_that_runs_out(store: FileStore) -> None:
    end = store.end()
    await end.publish(card())
    ear = await listen(store.end())
    await store.lose()
    await ear.until_heard(card(), False)
    await end.withdraw(WorkerId(1), card().incarnation)
    assert [what for what, _ in store.troubles] == ["worker 1"]
    await store.bring_back(is_empty=False)
    await ear.until_heard(card(), False, True, (1, 9, Gone.EXPIRED))


async def test_what_a_sink_raises_ends_no_watch(store: FileStore) -> None:
    raised: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: raised.append(context["exception"]))

    def refuse(_: object) -> None:
        raise ArithmeticError("a mistake")

    end = store.end()
    await end.watch(refuse, lambda *_: None)
    await end.publish(card(1))
    ear = await listen(end)
    await end.publish(card(2))
    await ear.until_heard(card(1), card(2))
    assert {type(each) for each in raised} == {ArithmeticError}


# A process that is killed

WORKER = """
import asyncio, sys
from pathlib import Path
from kvrouter.transports.discovery.file import FileDiscovery
from tests.support.discovery_stores import LEASE_S, card, nobody

async def live():
    end = FileDiscovery(
        Path(sys.argv[1]),
        namespace="space",
        on_trouble=nobody,
        on_refused=nobody,
        lease_s=LEASE_S,
        poll_s=0.02,
    )
    await end.publish(card())
    await asyncio.Event().wait()

asyncio.run(live())
"""


async def test_a_worker_that_is_killed_expires(store: FileStore) -> None:
    ear = await listen(store.end())
    worker = await asyncio.create_subprocess_exec(sys.executable, "-c", WORKER, str(store.directory))
    try:
        await ear.until_heard(card())
        worker.send_signal(signal.SIGKILL)
        await ear.until_heard(card(), (1, 9, Gone.EXPIRED))
    finally:
        if worker.returncode is None:
            worker.kill()
        await worker.wait()

"""The file store: which directories it takes for its own, and which settings it refuses."""

import os
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvrouter.core.errors import ConfigError
from kvrouter.transports.records.file import FileDiscovery
from kvrouter.transports.records.file.folder import MARKER
from tests.testing.discovery_stores import FileStore, card, file_store, ignore_reports, record_discovery


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[FileStore]:
    async with file_store(tmp_path) as made:
        yield made


async def test_directory_and_files_are_accessible_to_their_owner_only(store: FileStore) -> None:
    await store.end().publish(card())
    modes = {
        path.name: stat.S_IMODE(path.stat().st_mode)
        for path in (store.directory, *store.directory.rglob("*"))
    }
    assert modes == {"cards": 0o700, MARKER: 0o600, "space": 0o700, "worker-1.json": 0o600}


@pytest.mark.parametrize("which", [".", "space"])
async def test_world_writable_directory_is_refused(store: FileStore, which: str) -> None:
    (store.directory / "space").mkdir(parents=True)
    (store.directory / MARKER).touch()
    (store.directory / which).chmod(0o777)
    for act in (store.end().publish(card()), record_discovery(store.end())):
        with pytest.raises(ConfigError, match="everybody may write"):
            await act


async def test_a_directory_of_another_user_is_refused(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.directory.mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: store.directory.stat().st_uid + 1)
    with pytest.raises(ConfigError, match="belongs to user"):
        await record_discovery(store.end())


async def test_directory_made_world_writable_later_is_a_lost_store(store: FileStore) -> None:
    await store.end().publish(card())
    recorder = await record_discovery(store.end())
    store.directory.chmod(0o777)
    await recorder.until_heard(card(), False)
    store.directory.chmod(0o700)
    await recorder.until_heard(card(), False, True)


async def test_directory_that_cannot_be_created_is_a_config_error(store: FileStore) -> None:
    store.directory.write_text("a file")
    for act in (store.end().publish(card()), record_discovery(store.end())):
        with pytest.raises(ConfigError, match="cards"):
            await act


@pytest.mark.parametrize("name", ["passwd", "space/", "default/grub"])
async def test_directory_with_other_content_is_refused_and_left_unchanged(
    store: FileStore, name: str
) -> None:
    there = store.directory / name
    there.parent.mkdir(parents=True, exist_ok=True)
    there.mkdir() if name.endswith("/") else there.write_text("not ours")
    before = sorted(store.directory.rglob("*"))
    for act in (store.end().publish(card()), record_discovery(store.end())):
        with pytest.raises(ConfigError, match="is not empty, and no directory of worker cards"):
            await act
    assert sorted(store.directory.rglob("*")) == before


async def test_empty_directory_or_one_that_lost_its_marker_is_accepted(store: FileStore) -> None:
    store.directory.mkdir(mode=0o700)
    await store.end().publish(card())
    (store.directory / MARKER).unlink()
    recorder = await record_discovery(store.end())
    await recorder.until_heard(card())
    assert (store.directory / MARKER).exists()


async def test_only_the_last_folder_of_the_path_is_created(tmp_path: Path) -> None:
    async with file_store(tmp_path / "mistyped") as store:
        for act in (store.end().publish(card()), record_discovery(store.end())):
            with pytest.raises(ConfigError, match=r"mistyped/cards: No such file or directory"):
                await act
    assert not (tmp_path / "mistyped").exists()


@pytest.mark.parametrize("namespace", ["", "..", "a/b", "a.b", "a b", "x" * 65])
def test_invalid_namespace_is_refused(tmp_path: Path, namespace: str) -> None:
    with pytest.raises(ConfigError, match="namespace"):
        FileDiscovery(tmp_path, namespace=namespace, on_trouble=ignore_reports, on_refused=ignore_reports)


@pytest.mark.parametrize(
    ("param", "changes"),
    [
        ("lease_s", {"lease_s": 0.0}),
        ("lease_s", {"lease_s": 1e6}),
        ("poll_s", {"poll_s": 0.0}),
        ("poll_s", {"poll_s": 6.0}),
        ("remove_after_s", {"remove_after_s": 15.0}),
    ],
)
def test_times_out_of_range_are_refused(tmp_path: Path, param: str, changes: dict[str, float]) -> None:
    with pytest.raises(ConfigError) as refused:
        FileDiscovery(
            tmp_path,
            namespace="space",
            on_trouble=ignore_reports,
            on_refused=ignore_reports,
            **changes,  # type: ignore[arg-type]
        )
    assert refused.value.param == param

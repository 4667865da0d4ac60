"""Whoever has no Go, or one too old, is told what to get."""

from pathlib import Path

import pytest

from tests.cluster import install


@pytest.mark.parametrize(
    ("version", "says"), [(None, "needs Go 1.26"), ("go1.25.9", "is go1.25.9"), ("go1.27rc1", None)]
)
def test_go_is_new_enough_or_the_mend_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str | None, says: str | None
) -> None:
    go = tmp_path / "go"
    if version is not None:
        go.write_text(f"#!/bin/sh\necho {version}\n")
        go.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=None)
    if says is None:
        assert install.find_go() == str(go)
        return
    with pytest.raises(install.NoGo, match=says):
        install.find_go()


def test_a_server_that_is_not_built_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(install.VARIABLE, str(tmp_path))
    with pytest.raises(FileNotFoundError, match="make test-cluster"):
        install.server("etcd")

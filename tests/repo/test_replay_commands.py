"""The commands that README and pages show of ``kvrouter replay`` and ``kvrouter worth`` do what they say."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

RUN = "import sys; from kvrouter.cli import main; sys.exit(main(sys.argv[1:]))"

FENCE = re.compile(r"^```bash\n(.*?)^```$", re.DOTALL | re.MULTILINE)

INLINE = re.compile(r"`(kvrouter (?:replay|worth) data/[^`]*)`")


def run(script: str, folder: Path) -> str:
    """Run the script in ``folder`` with this project's kvrouter; return what it wrote."""
    (folder / "kvrouter").write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{RUN}" "$@"\n')
    (folder / "kvrouter").chmod(0o755)
    path = os.pathsep.join([str(folder), os.environ.get("PATH", os.defpath)])
    source = os.pathsep.join(sys.path)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder,
        env={**os.environ, "PATH": path, "PYTHONPATH": source},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def clone(folder: Path) -> Path:
    """A folder with what a clone has of data and examples."""
    for name in ("data", "examples"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def test_the_replay_pages_clone_commands_run_in_sequence(tmp_path: Path) -> None:
    in_clone, _ = FENCE.findall((ROOT / "docs/replay.md").read_text())
    assert run(in_clone, clone(tmp_path)).count("Mooncake, dispatched by time stamp") == 3
    assert (tmp_path / "out.json").is_file()


def test_the_replay_pages_other_commands_need_no_other_file(tmp_path: Path) -> None:
    _, anywhere = FENCE.findall((ROOT / "docs/replay.md").read_text())
    assert run(anywhere, tmp_path).count("generated, dispatched by time stamp") == 2
    assert (tmp_path / "out.html").is_file()


def test_the_worth_pages_command_gives_advice(tmp_path: Path) -> None:
    (command,) = FENCE.findall((ROOT / "docs/worth.md").read_text())
    assert "Switch to required on zone, kv by joint" in run(command, clone(tmp_path))


@pytest.mark.parametrize("page", ["README.md", "data/README.md"])
def test_commands_within_page_text_name_existing_files(page: str) -> None:
    commands = INLINE.findall((ROOT / page).read_text())
    assert commands
    for command in commands:
        files = [word for word in command.split() if word.startswith(("data/", "examples/"))]
        assert all((ROOT / name).is_file() for name in files)

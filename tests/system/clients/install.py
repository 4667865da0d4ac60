"""Installs the clients of these tests into a folder outside the project: Python's in virtual environments of
their own, because they ask for versions that kvrouter, or others of them, do not, and Node's by npm.

    python -m tests.system.clients.install

LiteLLM's proxy is older than its SDK: PyPI lacked ``litellm-proxy``, which 1.110.2 asks for, and the versions
of ``litellm-proxy-extras`` that 1.108.14 and 1.109.3 do. inference-perf needs Python 3.12 or later.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from scripts.steps import StepFailed, Steps
from tests.system.engines.install import engines_dir

VARIABLE = "KVROUTER_CLIENTS"
URL, MODEL = "{url}", "{model}"
"""What stands for a router and its model in a command."""

HERE = Path(__file__).parent
ENVIRONMENTS: Mapping[str, tuple[str, tuple[int, int]]] = {
    "venv": ("requirements.txt", (3, 11)),
    "proxy": ("requirements-proxy.txt", (3, 11)),
    "aiperf": ("requirements-aiperf.txt", (3, 11)),
    "inference-perf": ("requirements-inference-perf.txt", (3, 12)),
}
"""What is installed into each environment, and the lowest Python that it takes."""

REQUIREMENTS = tuple(file for file, _ in ENVIRONMENTS.values())
FILES = (*REQUIREMENTS, "package.json", "package-lock.json", "calls.mjs")
PYTHONS = ("python3.12", "python3.13")


class NotInstalled(Exception):
    """The clients are absent or stale, or cannot be installed; the message says how to mend it."""


def clients_dir() -> Path:
    """Where the clients are, or will be: ``KVROUTER_CLIENTS``, else a folder of this user's cache."""
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "kvrouter" / "clients"


def commands() -> dict[str, list[str]]:
    """What runs the calls of each kind. Raises NotInstalled unless all is that of these sources."""
    folder = clients_dir()
    if _stamped(folder) != _digest():
        raise NotInstalled(f"{folder} is absent or stale: install it with `make test-clients`")
    python = str(folder / "venv" / "bin" / "python")
    tokenizer = str(engines_dir() / "model")
    return {
        "python": [python, str(HERE / "calls.py"), URL, MODEL],
        "proxy": [python, str(HERE / "proxy_calls.py"), URL, MODEL, str(folder)],
        "node": [node(), str(folder / "calls.mjs"), URL, MODEL],
        "load": [python, str(HERE / "load_calls.py"), URL, MODEL, str(folder), tokenizer],
    }


def python_from(lowest: tuple[int, int]) -> str:
    """A Python of this version, or a later one. Raises NotInstalled where there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")  # it keeps all but one off PATH
    on_path: list[str] = [found for found in map(shutil.which, PYTHONS) if found is not None]
    paths = (sys.executable, *on_path, *map(str, sorted(pyenv.glob("versions/3.*/bin/python3"))))
    for path in paths:
        asked = "import sys; print(*sys.version_info[:2], sys.executable)"
        found = subprocess.run([path, "-c", asked], capture_output=True, text=True, check=False)
        if found.returncode == 0:
            major, minor, python = found.stdout.split(maxsplit=2)
            if (int(major), int(minor)) >= lowest:
                return python.strip()
    raise NotInstalled(f"make test-clients needs a Python {lowest[0]}.{lowest[1]} or later on PATH")


def node() -> str:
    """Node's program. Raises NotInstalled where there is none."""
    found = shutil.which("node")
    if found is None or shutil.which("npm") is None:
        raise NotInstalled("make test-clients needs Node 20 and npm on PATH")
    return found


def main() -> None:
    """Install what is not there yet."""
    parser = argparse.ArgumentParser(description="Install the clients of the tests: minutes, gigabytes.")
    parser.parse_args()
    folder = clients_dir()
    if _stamped(folder) == _digest():
        print(f"clients: ready in {folder}")
        return
    print(f"clients: installing into {folder}", flush=True)
    try:
        node()
        pythons = {name: python_from(lowest) for name, (_, lowest) in ENVIRONMENTS.items()}
    except NotInstalled as error:
        sys.exit(f"clients: {error}")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in FILES:
        shutil.copy(HERE / name, folder)
    steps = Steps("clients", len(ENVIRONMENTS) + 1)
    try:
        for name, (requirements, _) in ENVIRONMENTS.items():
            pip = (folder / name / "bin" / "python", "-m", "pip", "install", "--progress-bar", "off")
            steps.run(
                f"packages of {requirements}",
                [pythons[name], "-m", "venv", folder / name],
                [*pip, "--requirement", requirements],
                cwd=folder,
            )
        npm = ("npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund")
        steps.run("packages of npm", npm, cwd=folder)
    except StepFailed:
        sys.exit(1)
    (folder / "installed").write_text(_digest())
    print(f"clients: ready in {folder}")


def _stamped(folder: Path) -> str:
    stamp = folder / "installed"
    return stamp.read_text() if stamp.is_file() else ""


def _digest() -> str:
    return hashlib.sha256(b"".join((HERE / name).read_bytes() for name in FILES)).hexdigest()[:16]


if __name__ == "__main__":
    main()

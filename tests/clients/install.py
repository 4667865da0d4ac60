"""Installs the clients of these tests into a folder outside the project: Python's in a virtual environment of
their own, because they ask for versions that kvrouter does not, and Node's by npm.

    python -m tests.clients.install
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

VARIABLE = "KVROUTER_CLIENTS"
HERE = Path(__file__).parent
FILES = ("requirements.txt", "package.json", "package-lock.json", "calls.mjs")


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
    """What runs the calls of each language. Raises NotInstalled unless all is that of these sources."""
    folder = clients_dir()
    if _stamped(folder) != _digest():
        raise NotInstalled(f"{folder} is absent or stale: install it with `make test-clients`")
    return {
        "python": [str(folder / "venv" / "bin" / "python"), str(HERE / "calls.py")],
        "node": [node(), str(folder / "calls.mjs")],
    }


def node() -> str:
    """Node's program. Raises NotInstalled where there is none."""
    found = shutil.which("node")
    if found is None or shutil.which("npm") is None:
        raise NotInstalled("make test-clients needs Node 20 and npm on PATH")
    return found


def main() -> None:
    """Install what is not there yet."""
    parser = argparse.ArgumentParser(description="Install the clients of the tests; takes a minute.")
    parser.parse_args()
    folder = clients_dir()
    if _stamped(folder) == _digest():
        print(f"clients: ready in {folder}")
        return
    print(f"clients: installing into {folder}", flush=True)
    try:
        node()
    except NotInstalled as error:
        sys.exit(f"clients: {error}")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in FILES:
        shutil.copy(HERE / name, folder)
    venv.create(folder / "venv", with_pip=True)
    pip = [str(folder / "venv" / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, "--requirement", "requirements.txt"], cwd=folder, check=True)
    npm = ("npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--silent")
    subprocess.run(npm, cwd=folder, check=True)
    (folder / "installed").write_text(_digest())
    print(f"clients: ready in {folder}")


def _stamped(folder: Path) -> str:
    stamp = folder / "installed"
    return stamp.read_text() if stamp.is_file() else ""


def _digest() -> str:
    return hashlib.sha256(b"".join((HERE / name).read_bytes() for name in FILES)).hexdigest()[:16]


if __name__ == "__main__":
    main()

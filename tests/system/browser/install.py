"""Installs the browser of these tests into a folder outside the project.

    python -m tests.system.browser.install

It is the Chromium of npm's ``@sparticuz/chromium``, driven by ``playwright-core``. Node 20 and npm must be
here, and the libraries that every Chromium needs on Linux, such as libnss3.
"""

import argparse
import hashlib
import os
import shutil
import sys
from pathlib import Path

from scripts.steps import StepFailed, Steps

VARIABLE = "KVROUTER_BROWSER"
HERE = Path(__file__).parent
NPM = ("npm", "ci", "--ignore-scripts")
FILES = ("package.json", "package-lock.json", "unpack.mjs")


class NotInstalled(Exception):
    """The browser is absent or stale, or cannot be installed; the message says how to mend it."""


def browser_dir() -> Path:
    """Where the browser is, or will be: ``KVROUTER_BROWSER``, else a folder of this user's cache."""
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "kvrouter" / "browser"


def program() -> Path:
    """The browser's program. Raises NotInstalled unless it is that of these sources."""
    folder = browser_dir()
    path = folder / "unpacked" / "chromium"
    if not path.is_file() or _stamped(folder) != _digest():
        raise NotInstalled(f"{path} is absent or stale: install it with `make test-browser`")
    return path


def node() -> str:
    """Node's program. Raises NotInstalled where there is none."""
    found = shutil.which("node")
    if found is None or shutil.which("npm") is None:
        raise NotInstalled("make test-browser needs Node 20 and npm on PATH")
    return found


def main() -> None:
    """Install what is not there yet."""
    parser = argparse.ArgumentParser(description="Install a browser for the tests; takes seconds.")
    parser.parse_args()
    folder = browser_dir()
    if _stamped(folder) == _digest():
        print(f"browser: ready in {folder}")
        return
    print(f"browser: installing into {folder}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    unpacked = folder / "unpacked"
    unpacked.mkdir(parents=True)
    for name in FILES:
        shutil.copy(HERE / name, folder)
    program = node()
    # The package unpacks its browser into the folder of temporary files.
    variables = {**os.environ, "TMPDIR": str(unpacked)}
    steps = Steps("browser", 2)
    try:
        steps.run("packages of npm", [*NPM, "--no-audit", "--no-fund"], cwd=folder)
        steps.run("unpacking Chromium", [program, "unpack.mjs"], cwd=folder, env=variables)
    except StepFailed:
        sys.exit(1)
    (folder / "browser.installed").write_text(_digest())
    print(f"browser: ready in {folder}")


def _stamped(folder: Path) -> str:
    stamp = folder / "browser.installed"
    return stamp.read_text() if stamp.is_file() else ""


def _digest() -> str:
    return hashlib.sha256(b"".join((HERE / name).read_bytes() for name in FILES)).hexdigest()[:16]


if __name__ == "__main__":
    main()

"""Builds a real Prometheus for these tests, once, into a folder outside the project.

    python -m tests.system.monitoring.install

It is built from its published Go module: see ``go/go.mod``. The first build takes two to three minutes on two
cores, with the modules that it downloads; a later one takes seconds.
"""

import argparse
import hashlib
import os
import shutil
import sys
from pathlib import Path

from scripts.steps import StepFailed, Steps

VARIABLE = "KVROUTER_MONITORING"
MODULE = Path(__file__).parent / "go"
PACKAGE = "github.com/prometheus/prometheus/cmd/prometheus"
# The clients of clouds that could be asked for targets are most of what would have to be built.
ARGUMENTS = ("-trimpath", "-tags", "remove_all_sd", "-ldflags", "-s -w")


def prometheus_dir() -> Path:
    """Where it is, or will be: ``KVROUTER_MONITORING``, else a folder of this user's cache."""
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "kvrouter" / "monitoring"


def prometheus_program() -> Path:
    """The program. Raises FileNotFoundError unless it is built from this ``go.mod``."""
    folder = prometheus_dir()
    path = folder / "bin" / "prometheus"
    if not path.is_file() or _stamped(folder) != _digest():
        raise FileNotFoundError(f"{path} is absent or stale: build it with `make test-monitoring`")
    return path


def main() -> None:
    """Build what is not there yet."""
    argparse.ArgumentParser(description="Build a Prometheus for the tests; takes minutes.").parse_args()
    folder, digest = prometheus_dir(), _digest()
    if _stamped(folder) == digest:
        print(f"monitoring: ready in {folder}")
        return
    go = shutil.which("go")
    if go is None:
        sys.exit("monitoring: needs Go on PATH, of the version in tests/system/monitoring/go/go.mod or newer")
    stamp = folder / "built"
    stamp.unlink(missing_ok=True)
    (folder / "bin").mkdir(parents=True, exist_ok=True)
    environ = {**os.environ, "CGO_ENABLED": "0", "GOTOOLCHAIN": "local", "GOFLAGS": "-mod=readonly"}
    command = [go, "build", "-v", *ARGUMENTS, "-o", str(folder / "bin" / "prometheus"), PACKAGE]
    try:
        Steps("monitoring", 1).run("Prometheus, minutes the first time", command, cwd=MODULE, env=environ)
    except StepFailed:
        sys.exit(f"monitoring: {PACKAGE} could not be built, as shown above; its modules come from GOPROXY")
    stamp.write_text(digest)
    print(f"monitoring: ready in {folder}")


def _stamped(folder: Path) -> str:
    stamp = folder / "built"
    return stamp.read_text() if stamp.is_file() else ""


def _digest() -> str:
    """Of all that it is built from."""
    digest = hashlib.sha256(" ".join((PACKAGE, *ARGUMENTS)).encode())
    for path in sorted(path for path in MODULE.rglob("*") if path.is_file()):
        digest.update(f"{path.relative_to(MODULE)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    main()

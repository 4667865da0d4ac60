"""Builds a real Kubernetes control plane for these tests, once, into a folder outside the project.

    python -m tests.cluster.install

No registry has these servers ready-made, but each is a few lines over a published Go module: see ``go/``. The
first build takes seven minutes on two cores that have nothing else to do, and Go's own cache grows by 3 GB; a
later one takes seconds.
"""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

KUBERNETES = "v1.36.2"
VARIABLE = "KVROUTER_CLUSTER"
MODULE = Path(__file__).parent / "go"
KWOK = "sigs.k8s.io/kwok/cmd/kwok"
SERVERS = ("etcd", "kube-apiserver", "kube-scheduler", "kube-controller-manager", "kwok")
# Without its version a server calls itself v0.0.0-master, and clients warn of it.
LINKING = f"-s -w -X k8s.io/component-base/version.gitVersion={KUBERNETES}"


class NoGo(Exception):
    """There is no Go that can build the servers; the message tells how to fix it."""


class NotBuilt(Exception):
    """Go could not do it; its own words are on the terminal, and the message tells what they are about."""


def cluster_dir() -> Path:
    """Where the servers are, or will be: ``KVROUTER_CLUSTER``, else a folder of this user's cache."""
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "kvrouter" / "cluster"


def server(name: str) -> Path:
    """The program of one of ``SERVERS``. Raises FileNotFoundError unless it is built from these sources."""
    folder = cluster_dir()
    path = folder / "bin" / name
    if not path.is_file() or _stamped(folder) != _digest():
        raise FileNotFoundError(f"{path} is absent or stale: build it with `make test-cluster`")
    return path


def main() -> None:
    """Build what is not there yet."""
    parser = argparse.ArgumentParser(
        description="Build a Kubernetes control plane for the tests; takes minutes."
    )
    parser.parse_args()
    folder = cluster_dir()
    digest = _digest()
    if _stamped(folder) == digest:
        print(f"cluster: ready in {folder}")
        return
    try:
        go = find_go()
        print(f"cluster: building {', '.join(SERVERS)} into {folder}: minutes, the first time", flush=True)
        stamp = folder / "built"
        stamp.unlink(missing_ok=True)
        (folder / "bin").mkdir(parents=True, exist_ok=True)
        build(go, folder / "bin")
    except (NoGo, NotBuilt) as error:
        sys.exit(f"cluster: {error}")
    stamp.write_text(digest)
    print(f"cluster: ready in {folder}")


def build(go: str, folder: Path) -> None:
    """Build every server into ``folder``. Raises NotBuilt."""
    packages = [*(f"./cmd/{name}" for name in SERVERS if name != "kwok"), KWOK]
    print("cluster: Go modules", flush=True)
    if _go(go, "list", "-deps", "-f", "{{with .Error}}{{.}}{{end}}", *packages):
        proxy = subprocess.run([go, "env", "GOPROXY"], capture_output=True, text=True, check=False).stdout
        raise NotBuilt(
            f"the Go modules of {MODULE} could not be had, as shown above. They are asked of GOPROXY "
            f"({proxy.strip() or 'none'}): let this machine reach it, or name one that it reaches"
        )
    for package in packages:
        print(f"cluster: {package}", flush=True)
        target = folder / Path(package).name
        if _go(go, "build", "-trimpath", "-ldflags", LINKING, "-o", str(target), package):
            raise NotBuilt(f"{package} could not be built, as shown above")


def _go(go: str, *arguments: str) -> int:
    """Run Go among the sources; answers with its exit code."""
    environ = {**os.environ, "CGO_ENABLED": "0", "GOTOOLCHAIN": "local", "GOFLAGS": "-mod=readonly"}
    return subprocess.run([go, *arguments], cwd=MODULE, env=environ, check=False).returncode


def find_go() -> str:
    """The program ``go``. Raises NoGo when there is none, or when it is older than go.mod asks for."""
    wanted = re.search(r"^go (\S+)$", (MODULE / "go.mod").read_text(), re.MULTILINE)
    assert wanted is not None
    go = shutil.which("go")
    if go is None:
        raise NoGo(f"needs Go {wanted[1]} or newer on PATH: https://go.dev/dl/")
    said = subprocess.run([go, "env", "GOVERSION"], capture_output=True, text=True, check=True).stdout.strip()
    if _numbers(said) < _numbers(wanted[1]):
        raise NoGo(f"needs Go {wanted[1]} or newer, and {go} is {said}: https://go.dev/dl/")
    return go


def _numbers(version: str) -> tuple[int, ...]:
    """``go1.26.8`` and ``1.27rc1`` as numbers; what follows them is left out."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("rc")[0])[:3])


def _stamped(folder: Path) -> str:
    stamp = folder / "built"
    return stamp.read_text() if stamp.is_file() else ""


def _digest() -> str:
    """Of all that the servers are built from."""
    digest = hashlib.sha256(LINKING.encode())
    for path in sorted(path for path in MODULE.rglob("*") if path.is_file()):
        digest.update(f"{path.relative_to(MODULE)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    main()

"""Builds a real Kubernetes control plane for these tests, once, into a folder outside the project.

    python -m tests.system.cluster.install [--key]

No registry has these servers ready-made, but each is a few lines over a published Go module: see ``go/``. The
first build takes seven minutes on two cores that have nothing else to do, and Go's own cache grows by 3 GB; a
later one takes seconds.

Each program's name ends with the hash of what it is built from, the version of Go apart. So the folder can be
kept and brought to other machines: they build nothing then, and need no Go. ``--key`` prints a name for what
is kept. Programs of several branches are there at a time, and one that changes is built alone.
"""

import argparse
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from scripts.steps import StepFailed, Steps

KUBERNETES = "v1.36.2"
VARIABLE = "KVROUTER_CLUSTER"
MODULE = Path(__file__).parent / "go"
VERSIONS_KEPT = 3
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
    path = program(name)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not built yet: build it with `make test-cluster`")
    return path


def program(name: str) -> Path:
    """Where the program of one of ``SERVERS`` is, or will be, that is built from these sources."""
    return cluster_dir() / "bin" / f"{name}-{key(name)}"


def key(name: str) -> str:
    """The hash of all that one of ``SERVERS`` is built from, and of what it runs on."""
    digest = hashlib.sha256(f"{LINKING} {platform.system()} {platform.machine()}".encode())
    own = sorted(path for path in (MODULE / "cmd" / name).rglob("*") if path.is_file())
    for path in (MODULE / "go.mod", MODULE / "go.sum", *own):
        digest.update(f"{path.relative_to(MODULE)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def main(arguments: Sequence[str] | None = None) -> None:
    """Build what is not there yet. None for ``arguments`` takes those of the command line."""
    parser = argparse.ArgumentParser(
        description="Build a Kubernetes control plane for the tests; takes minutes."
    )
    parser.add_argument("--key", action="store_true", help="print a name for the folder's contents, and end")
    if parser.parse_args(arguments).key:
        print(hashlib.sha256("".join(map(key, SERVERS)).encode()).hexdigest()[:16])
        return
    folder = cluster_dir()
    absent = [name for name in SERVERS if not program(name).is_file()]
    if absent:
        try:
            go = find_go()
            print(f"cluster: building into {folder}: minutes, the first time", flush=True)
            (folder / "bin").mkdir(parents=True, exist_ok=True)
            build(go, absent)
        except (NoGo, NotBuilt) as error:
            sys.exit(f"cluster: {error}")
    for name in SERVERS:
        _forget_old_versions(name)
    print(f"cluster: ready in {folder}")


def _forget_old_versions(name: str) -> None:
    program(name).touch()  # it is in use
    versions = cluster_dir().glob(f"bin/{name}-{'[0-9a-f]' * 16}")
    for old in sorted(versions, key=lambda path: path.stat().st_mtime, reverse=True)[VERSIONS_KEPT:]:
        old.unlink()


def build(go: str, names: Sequence[str]) -> None:
    """Build these servers, etcd and the API server first. Raises NotBuilt. One that is interrupted leaves no
    program, and two at a time do each other no harm.
    """
    packages = {name: KWOK if name == "kwok" else f"./cmd/{name}" for name in names}
    environ = {**os.environ, "CGO_ENABLED": "0", "GOTOOLCHAIN": "local", "GOFLAGS": "-mod=readonly"}
    steps = Steps("cluster", 1 + len(packages))
    modules = (go, "list", "-deps", "-f", "{{with .Error}}{{.}}{{end}}", *packages.values())
    try:
        steps.run("Go modules", modules, cwd=MODULE, env=environ)
    except StepFailed:
        proxy = subprocess.run([go, "env", "GOPROXY"], capture_output=True, text=True, check=False).stdout
        raise NotBuilt(
            f"the Go modules of {MODULE} could not be had, as shown above. They are asked of GOPROXY "
            f"({proxy.strip() or 'none'}): let this machine reach it, or name one that it reaches"
        ) from None
    for name, package in packages.items():
        target = program(name)
        fresh = target.with_name(f".{target.name}.{os.getpid()}")
        command = (go, "build", "-v", "-trimpath", "-ldflags", LINKING, "-o", fresh, package)
        try:
            steps.run(f"{name}, {package}", command, cwd=MODULE, env=environ)
        except StepFailed:
            raise NotBuilt(f"{package} could not be built, as shown above") from None
        fresh.replace(target)


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


if __name__ == "__main__":
    main()

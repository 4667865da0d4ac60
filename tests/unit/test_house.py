"""Rules of the house that import-linter cannot see: compiled modules and forbidden names."""

import re
from pathlib import Path

import kvrouter

HOME = Path(kvrouter.__file__).parent
IMPORTS_NATIVE = re.compile(
    r"^\s*(from kvrouter\._native import|import kvrouter\._native|from kvrouter import _native)", re.M
)
IMPORTS_NAIVE = re.compile(r"^\s*(from|import) kvrouter\.\w+\.naive", re.M)


def sources() -> dict[str, str]:
    return {str(path.relative_to(HOME)): path.read_text("utf-8") for path in HOME.rglob("*.py")}


def test_only_the_native_doors_import_the_native_core() -> None:
    doors = {name for name, text in sources().items() if IMPORTS_NATIVE.search(text)}
    assert doors == {"core/hashing.py", "core/json_bounds.py", "index/native.py", "ledger/native.py"}


def test_the_readable_twins_are_for_tests_alone() -> None:
    assert [name for name, text in sources().items() if IMPORTS_NAIVE.search(text)] == []


def test_no_module_is_a_grab_bag() -> None:
    grab_bags = {"utils", "common", "helpers", "base", "manager"}
    assert [name for name in sources() if grab_bags & set(Path(name).with_suffix("").parts)] == []

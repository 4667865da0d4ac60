"""Rules of the house that import-linter cannot see: compiled modules and forbidden names."""

import re
from pathlib import Path

import kvrouter

HOME = Path(kvrouter.__file__).parent
IMPORTS_NATIVE = re.compile(
    r"^\s*(from kvrouter\._native import|import kvrouter\._native|from kvrouter import _native)", re.M
)


def sources() -> dict[str, str]:
    return {str(path.relative_to(HOME)): path.read_text("utf-8") for path in HOME.rglob("*.py")}


def test_only_the_native_doors_import_the_native_core() -> None:
    doors = {name for name, text in sources().items() if IMPORTS_NATIVE.search(text)}
    assert doors == {"core/hashing.py", "core/json_bounds.py", "index.py", "ledger/port.py"}


def test_no_module_is_a_grab_bag() -> None:
    grab_bags = {"utils", "common", "helpers", "base", "manager"}
    assert [name for name in sources() if grab_bags & set(Path(name).with_suffix("").parts)] == []


def test_a_path_says_what_it_holds_in_the_fields_words() -> None:
    private = {"words", "told", "facts", "seen", "ways", "placed", "ground", "family", "desk", "customs"}
    private |= {"beside", "contacts", "seldom", "wishes", "parted"}
    assert [name for name in sources() if private & set(Path(name).with_suffix("").parts)] == []


def test_the_module_map_names_files_that_are_there_and_every_package() -> None:
    page = (HOME.parents[1] / "docs" / "module-map.md").read_text("utf-8")
    named = set(re.findall(r"`([a-z_0-9/]+\.py)`", page))
    assert named - set(sources()) == set()
    packages = {name.split("/")[0] for name in sources() if "/" in name}
    assert packages - {name.split("/")[0] for name in named} == set()

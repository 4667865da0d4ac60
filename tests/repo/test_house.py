"""Rules of the tree that import-linter cannot see: who imports the native core, and how files are named."""

import ast
import configparser
import re
from pathlib import Path

import kvrouter
from kvrouter.engines.openai.pages import OWNERS
from kvrouter.engines.registry import ENGINES
from kvrouter.operator.plan.programs import DYNAMO_ENGINES, ENGINE_LABELS, HTTP_IMAGES, HTTP_PROGRAMS
from kvrouter.text.prompts import PROMPT_MAKERS
from kvrouter.text.prompts.tokenize import CHAT_READERS

HOME = Path(kvrouter.__file__).parent
IMPORTS_NATIVE = re.compile(
    r"^\s*(from kvrouter\._native import|import kvrouter\._native|from kvrouter import _native)", re.M
)


def sources() -> dict[str, str]:
    return {str(path.relative_to(HOME)): path.read_text("utf-8") for path in HOME.rglob("*.py")}


def test_only_listed_modules_import_the_native_core() -> None:
    doors = {name for name, text in sources().items() if IMPORTS_NATIVE.search(text)}
    assert doors == {
        "core/events.py",
        "core/hashing.py",
        "core/json_bounds.py",
        "kernel/index.py",
        "kernel/ledger/port.py",
        "engines/kv_events/batches.py",
        "engines/kv_events/rank_blocks.py",
        "engines/mock_engine/ranks.py",
        "recording/recorder.py",
        "telemetry/log_forms.py",
        "kernel/routing/joint.py",
        "kernel/routing/pick.py",
        "kernel/routing/fleet_links.py",
        "kernel/routing/costs/time.py",
    }


def test_only_the_registry_imports_the_package_of_an_engine_kind() -> None:
    """Only the registry imports the package of a kind. The mock is no server that is attached."""
    kinds = {name.split("/")[1] for name in sources() if re.fullmatch(r"engines/\w+/attach\.py", name)}
    assert {package.rpartition(".")[2] for package in ENGINES.values()} == kinds
    named = re.compile(rf"kvrouter\.engines\.({'|'.join(kinds)})\b")
    namers = {
        (name, kind)
        for name, text in sources().items()
        for kind in named.findall(text)
        if not name.startswith(f"engines/{kind}/") and name != "engines/registry.py"
    }
    assert namers == set()


def test_each_engine_kind_has_a_row_in_every_table_by_kind() -> None:
    """A kind without a line gets another kind's prompts, or the operator does not recognise its server."""
    tables: dict[str, set[str]] = {
        "PROMPT_MAKERS of text/prompts/__init__.py": set(PROMPT_MAKERS),
        "CHAT_READERS of text/prompts/tokenize.py": set(CHAT_READERS),
        "ENGINE_LABELS of operator/plan/programs.py": set(ENGINE_LABELS),
        "OWNERS of engines/openai/pages.py": {name.replace("tensorrt_llm", "trtllm") for name in OWNERS},
        "HTTP_PROGRAMS of operator/plan/programs.py": {kind for kind in HTTP_PROGRAMS.values() if kind},
    }
    assert {table: set(ENGINES) ^ kinds for table, kinds in tables.items() if kinds != set(ENGINES)} == {}
    known = {*DYNAMO_ENGINES.values(), *(kind for _, kind in HTTP_IMAGES if kind)}
    assert known <= set(ENGINES)


def test_no_module_has_a_grab_bag_name() -> None:
    grab_bags = {"utils", "common", "helpers", "base", "manager"}
    assert [name for name in sources() if grab_bags & set(Path(name).with_suffix("").parts)] == []


def test_files_named_in_contributing_exist() -> None:
    contributing = (HOME.parents[1] / "CONTRIBUTING.md").read_text("utf-8")
    in_packages = set(re.findall(r"`([a-z_0-9]+/[a-z_0-9/]+\.py)`", contributing))
    assert {name for name in in_packages if not name.startswith("tests/")} - set(sources()) == set()
    in_tests = set(re.findall(r"\btests/[a-z_0-9/]+", contributing))
    assert {name for name in in_tests if not [*HOME.parents[1].glob(f"{name}*")]} == set()


def test_modules_named_in_architecture_exist() -> None:
    page = (HOME.parents[1] / "docs" / "architecture.md").read_text("utf-8")
    paths = {HOME / name.replace(".", "/") for name in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)`", page)}
    named = {path for path in paths if (HOME / path.relative_to(HOME).parts[0]).is_dir()}
    assert named
    assert {path for path in named if not (path.is_dir() or path.with_suffix(".py").is_file())} == set()


def test_readme_and_architecture_show_the_same_package_layers() -> None:
    root = HOME.parents[1]
    texts = [(root / name).read_text("utf-8") for name in ("README.md", "docs/architecture.md")]
    first, second = (re.findall(r"```text\n( cli .*?)```", text, re.S) for text in texts)
    assert first == second
    shown = [set(re.findall(r"\w+", layer)) for layer in re.findall(r"^ (\w.*?)(?:  .*)?$", first[0], re.M)]
    contracts = configparser.ConfigParser()
    contracts.read(root / ".importlinter", "utf-8")
    layers = contracts["importlinter:contract:floors"]["layers"].strip().splitlines()
    assert shown == [set(re.findall(r"\w+", layer)) for layer in layers]


def test_type_only_imports_hide_no_cycle() -> None:
    """Where a module imports for its types alone, what it imports does not import it, by any way."""
    modules = {
        name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): name for name in sources()
    }
    imports = {module: set[str]() for module in modules}
    for_types: list[tuple[str, str]] = []
    for module, name in modules.items():
        if module == "__init__":  # the library's names, which are imported when they are asked for
            continue
        tree = ast.parse((HOME / name).read_text("utf-8"))
        hidden = {
            node
            for block in ast.walk(tree)
            if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
            for node in ast.walk(block)
        }
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("kvrouter."):
                continue
            source = (node.module or "").removeprefix("kvrouter.")
            for found in (source, *(f"{source}.{alias.name}" for alias in node.names)):
                if found in modules and node in hidden:
                    for_types.append((module, found))
                elif found in modules:
                    imports[module].add(found)
    for module, found in for_types:
        reached, todo = set[str](), [found]
        while todo:
            each = todo.pop()
            if each not in reached:
                reached.add(each)
                todo += imports[each]
        assert module not in reached, f"{module} imports {found} for its types, which imports it"


def test_only_core_json_calls_the_decoders() -> None:
    """core/json.py counts what long texts would become, and catches whatever a decoder may raise."""
    caught = {"MsgspecError", "DecodeError", "ValidationError"}
    found: set[str] = set()
    for name, text in sources().items():
        if name == "core/json.py":
            continue
        made = set(re.findall(r"^\s*(_?\w+)(?::[^=\n]+)? = msgspec\.(?:json|msgpack)\.Decoder\(", text, re.M))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ExceptHandler) and node.type is not None:
                named = {each.attr for each in ast.walk(node.type) if isinstance(each, ast.Attribute)}
                if caught & named:
                    found.add(f"{name}:{node.lineno}: catches {', '.join(sorted(caught & named))}")
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            called = ast.unparse(node.func)
            if called in ("msgspec.json.decode", "msgspec.msgpack.decode", "msgspec.convert") or (
                node.func.attr == "decode" and called.removesuffix(".decode").removeprefix("self.") in made
            ):
                found.add(f"{name}:{node.lineno}: {called}")
    assert found == set()

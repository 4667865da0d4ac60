"""The page of modules: packages from top to bottom, each file with the first sentence of its docstring."""

import ast
import configparser
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "src" / "kvrouter"
HEAD = """# Module map

{made}
Paths are under `src/kvrouter/`. Packages stand from top to bottom: one imports only what comes after it. Each
file has the first sentence of its docstring; a name in bold is a package. How they work together is in
[architecture.md](architecture.md), what the words mean in the [glossary](glossary.md).

Rust is in `native/` (hashing, block index, ledger, mock ranks, JSON scan), with `_native.pyi` as its
contract. Readable twins in Python, which tests compare it with, are in `tests/oracles/`.
"""


def module_map(made: str) -> str:
    """Return the page; ``made`` is its note on how it is written."""
    parts = [HEAD.format(made=made)]
    for package in packages():
        path = SOURCES / package
        files = [path.with_suffix(".py")] if not path.is_dir() else [*_files(path)]
        rows = [f"| {_name(file)} | {_row(about(file))} |\n" for file in files if file.name != "__main__.py"]
        parts.append(f"\n## {package}\n\n| file | |\n| --- | --- |\n{''.join(rows)}")
    return "".join(parts)


def packages(contract: Path = ROOT / ".importlinter") -> list[str]:
    """Return what stands directly under ``kvrouter``, from top to bottom as the layers order it."""
    parser = configparser.ConfigParser()
    parser.read(contract, "utf-8")
    layers = parser["importlinter:contract:floors"]["layers"]
    ordered = [name.partition(".")[0] for name in re.findall(r"[\w.]+", layers)]
    return list(dict.fromkeys(ordered))


def about(file: Path) -> str:
    """Return the first sentence of a module's docstring."""
    text = ast.get_docstring(ast.parse(file.read_text("utf-8"))) or ""
    return re.split(r"(?<=[.?!]) (?=[A-Z`])", " ".join(text.partition("\n\n")[0].split()))[0]


def _files(package: Path) -> Iterator[Path]:
    """Yield a package's own modules by name, and after them those of the packages in it."""
    yield package / "__init__.py"
    yield from sorted(path for path in package.glob("*.py") if path.name != "__init__.py")
    for below in sorted(path.parent for path in package.glob("*/__init__.py")):
        yield from _files(below)


def _name(file: Path) -> str:
    if file.name == "__init__.py":
        return f"**`{file.parent.relative_to(SOURCES).as_posix()}/`**"
    return f"`{file.relative_to(SOURCES).as_posix()}`"


def _row(text: str) -> str:
    return text.replace("``", "`").replace("|", "\\|")

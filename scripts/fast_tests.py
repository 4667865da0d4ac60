"""Run lint, types and the unit tests of what changed since main, in less than two minutes.

    python -m scripts.fast_tests [--list]

A test file is nearer to a change the fewer imports lie between them: one that changed itself, one that
imports a changed module, one that imports what imports it. The nearest run, as many as fit into the time; how
many others depend on the change is printed. ``make test`` runs them all.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from scripts.gate import ROOT, latest_recorded, run_stages

TESTS = re.compile(r"tests/(\w+/(unit|laws)|repo)/test_")
CHANGED_TESTS = re.compile(r"tests/(\w+/(unit|laws|contract)|repo|system/scenario)/test_")
SOURCES = ("src/kvrouter", "tests", "scripts", "benchmarks")
NATIVE = "src/kvrouter/_native.pyi"
"""Stands for all native code."""

IMPORT = re.compile(r"^ *(?:from ([\w.]+) import (\([^)]*\)|.*)|import ([\w.]+))", re.M)

BUDGET_S = 100.0
"""Of test time, over all workers."""

UNKNOWN_FILE_S = 0.5
"""What a file is taken to need of which no run of the gate was recorded."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks, then the tests; 1 when something failed."""
    parser = argparse.ArgumentParser(prog="fast_tests", description="Check what changed since main.")
    parser.add_argument("--list", action="store_true", help="print the test files, and run nothing")
    parser.add_argument("--jobs", default="2", help="how many workers run tests")
    options = parser.parse_args(arguments)
    chosen, left = choose(nearest_tests(changed_files()), recorded_s())
    if options.list:
        print("\n".join(chosen))
        return 0
    with tempfile.TemporaryDirectory(prefix="kvrouter-fast-") as folder:
        parts = run_stages(((("lint",), ("types",)),), root=ROOT, times=Path(folder))
    if any(part.exit_code for part in parts):
        return 1
    if not chosen:
        print("no unit test depends on what changed since main")
        return 0
    command = [sys.executable, "-m", "pytest", "-n", options.jobs, "--dist", "worksteal", "-m", "not nightly"]
    code = subprocess.run([*command, *chosen], cwd=ROOT, check=False).returncode
    if left:
        print(f"{left} more test files depend on what changed; make test runs them all")
    return code


def changed_files() -> list[str]:
    """The files that differ from main, those that git does not know yet included."""
    bases = ("origin/main", "main", "HEAD")
    base = next(base for base in bases if _git("rev-parse", "--verify", "--quiet", base))
    since = _git("merge-base", "HEAD", base).strip() or base
    listed = _git("diff", "--name-only", since) + _git("ls-files", "--others", "--exclude-standard")
    return sorted({*listed.splitlines()})


def nearest_tests(changed: Iterable[str]) -> list[str]:
    """The test files that depend on these files, the nearest first."""
    files = _python_files()
    importers = _importers(files)
    frontier = {NATIVE if path.startswith("native/") else path for path in changed}
    others = {_name_in_tests(path) for path in frontier if not path.endswith((".py", ".pyi"))}
    found = [path for path in sorted(frontier) if CHANGED_TESTS.match(path) and (ROOT / path).exists()]
    seen = set(frontier)
    is_first = True
    while frontier:
        frontier = {path for each in frontier for path in importers.get(each, ())}
        if is_first and others:
            frontier |= {path for path in files if _names_one_of(path, others)}
        is_first = False
        frontier -= seen
        seen |= frontier
        found += [path for path in sorted(frontier) if TESTS.match(path)]
    return found


def choose(nearest: Sequence[str], seconds: Mapping[str, float]) -> tuple[list[str], int]:
    """The first of these files that fit into the budget, and how many are left out."""
    chosen: list[str] = []
    left_s = BUDGET_S
    for path in nearest:
        took_s = seconds.get(path, UNKNOWN_FILE_S)
        if took_s <= left_s:
            chosen.append(path)
            left_s -= took_s
    return chosen, len(nearest) - len(chosen)


def recorded_s() -> dict[str, float]:
    """The seconds of each test file in the latest run of the gate that was recorded."""
    latest = latest_recorded()
    return {} if latest is None else latest["file_s"]


def _importers(files: Iterable[str]) -> dict[str, set[str]]:
    """For each of these Python files, those that import it."""
    of_module = {_module(path): path for path in files}
    importers: defaultdict[str, set[str]] = defaultdict(set)
    for path in of_module.values():
        for module in _imported((ROOT / path).read_text()):
            if (imported := of_module.get(module)) is not None:
                importers[imported].add(path)
    return importers


def _imported(source: str) -> Iterator[str]:
    """The modules that a file may import: what follows ``import`` in ``from a import b`` may be one."""
    for package, names, module in IMPORT.findall(source):
        yield package or module
        yield from (f"{package}.{name}" for name in re.findall(r"\w+", names))


def _module(path: str) -> str:
    stem = path.removeprefix("src/").removesuffix(".pyi").removesuffix(".py").removesuffix("/__init__")
    return stem.replace("/", ".")


def _python_files() -> list[str]:
    found = (path for folder in SOURCES for path in (ROOT / folder).rglob("*.py*"))
    return [str(path.relative_to(ROOT)) for path in found if path.suffix in {".py", ".pyi"}]


def _name_in_tests(path: str) -> str:
    """How a test names a file that it reads: without its folder, where the name is more than a word."""
    name = Path(path).name
    return name if "." in name else path


def _names_one_of(path: str, names: Iterable[str]) -> bool:
    text = (ROOT / path).read_text()
    return any(name in text for name in names)


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False).stdout


if __name__ == "__main__":
    sys.exit(main())

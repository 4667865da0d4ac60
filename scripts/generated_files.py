"""Files that scripts write: written anew, or only compared with what the scripts would write."""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path


def write_or_check(
    files: Mapping[Path, Callable[[], str]], arguments: Sequence[str], *, script: str, root: Path
) -> int:
    """Write the files, or with ``--check`` name those that are stale; return the exit code."""
    if list(arguments) not in ([], ["--check"]):
        print(f"usage: python -m scripts.{script} [--check]", file=sys.stderr)
        return 2
    stale = 0
    for path, make in files.items():
        text = make()
        if path.is_file() and path.read_text("utf-8") == text:
            continue
        stale += 1
        name = path.relative_to(root)
        if arguments:
            print(f"{name}: stale, run make docs", file=sys.stderr)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
            print(f"{name}: written")
    return 1 if arguments and stale else 0

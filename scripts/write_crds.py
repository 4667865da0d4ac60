"""Write the definitions that a cluster installs, made from the models of the API.

``python -m scripts.write_crds`` writes them to ``deploy/crds``; with ``--check`` it writes nothing, names
each file that is not what the models say, and exits 1 when there is one. They are no part of the chart:
Helm 4 would take over definitions that another chart wrote.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from kvrouter.operator.api.crd import CRD_FILE, crd_yaml
from scripts.pod_template_schema import pod_template_schema

DEPLOY = Path(__file__).parents[1] / "deploy"
MADE = "# Made by `make docs` from kvrouter.operator.api: change the models, not this file.\n"

FILES: dict[str, Callable[[], str]] = {CRD_FILE: lambda: crd_yaml(pod_template_schema())}


def main(arguments: list[str], deploy: Path = DEPLOY) -> int:
    """Write the files, or check them; return the exit code."""
    if arguments not in ([], ["--check"]):
        print("usage: python -m scripts.write_crds [--check]", file=sys.stderr)
        return 2
    stale = 0
    for path, text in _files(deploy):
        if path.is_file() and path.read_text("utf-8") == text:
            continue
        stale += 1
        name = f"deploy/{path.relative_to(deploy)}"
        if arguments:
            print(f"{name}: stale, run make docs", file=sys.stderr)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
            print(f"{name}: written")
    return 1 if arguments and stale else 0


def _files(deploy: Path) -> Iterator[tuple[Path, str]]:
    """Each file and what it must hold."""
    for name, make in FILES.items():
        yield deploy / "crds" / name, MADE + make()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Write the definitions that a cluster installs, made from the models of the API.

``python -m scripts.write_crds`` writes them to ``deploy/crds``; with ``--check`` it writes nothing, names
each file that is not what the models say, and exits 1 when there is one.
"""

import sys
from collections.abc import Callable
from pathlib import Path

from kvrouter.operator.api.crd import CRD_FILE, crd_yaml

CRDS = Path(__file__).parents[1] / "deploy" / "crds"
MADE = "# Made by `make docs` from kvrouter.operator.api: change the models, not this file.\n"

FILES: dict[str, Callable[[], str]] = {CRD_FILE: crd_yaml}


def main(arguments: list[str], crds: Path = CRDS) -> int:
    """Write the files, or check them; return the exit code."""
    if arguments not in ([], ["--check"]):
        print("usage: python -m scripts.write_crds [--check]", file=sys.stderr)
        return 2
    stale = []
    for name, made in FILES.items():
        path, text = crds / name, MADE + made()
        if path.is_file() and path.read_text("utf-8") == text:
            continue
        stale.append(name)
        if not arguments:
            crds.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
            print(f"deploy/crds/{name}: written")
    if arguments and stale:
        print(
            "".join(f"deploy/crds/{name}: stale, run make docs\n" for name in stale), end="", file=sys.stderr
        )
    return 1 if arguments and stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

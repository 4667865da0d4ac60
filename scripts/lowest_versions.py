"""Prints the lowest declared version of each dependency, as pip's constraints: ``name==version``.

python -m scripts.lowest_versions > lowest.txt
"""

import re
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
DECLARED = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^]]*\])?>=([0-9.]+)")


def lowest_versions() -> list[str]:
    """Return a constraint for each dependency that users install, and for those of the extras but ``dev``."""
    project = tomllib.loads(PYPROJECT.read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    optional = (each for name in extras if name != "dev" for each in extras[name])
    declared = [*project["dependencies"], *optional]
    found = [DECLARED.match(each) for each in declared]
    return sorted({f"{match[1]}=={match[2]}" for match in found if match is not None})


if __name__ == "__main__":
    print("\n".join(lowest_versions()))

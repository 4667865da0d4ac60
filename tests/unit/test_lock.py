"""The locked development environment has every dependency, in a version that pyproject.toml allows."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

HOME = Path(__file__).parents[2]


def locked() -> dict[str, str]:
    lines = re.findall(r"^([A-Za-z0-9._-]+)==(\S+)$", (HOME / "constraints.txt").read_text("utf-8"), re.M)
    return {canonicalize_name(name): version for name, version in lines}


def declared() -> list[str]:
    project = tomllib.loads((HOME / "pyproject.toml").read_text("utf-8"))["project"]
    return [
        *project["dependencies"],
        *(each for extra in project["optional-dependencies"].values() for each in extra),
    ]


@pytest.mark.parametrize("text", sorted(set(declared())))
def test_a_dependency_is_locked_in_its_range(text: str) -> None:
    requirement = Requirement(text)
    assert requirement.specifier.contains(locked()[canonicalize_name(requirement.name)])

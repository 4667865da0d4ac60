"""The locks have every dependency, in a version that pyproject.toml allows; locks/ has hashes too."""

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts.write_locks import EXTRAS

HOME = Path(__file__).parents[2]
OWN = "kvrouter"
ENTRY = re.compile(
    r"^(?P<name>[a-z0-9-]+)==(?P<version>\S+)(?P<hashes>( \\\n    --hash=sha256:[0-9a-f]{64})+)"
    r"(?P<via>(\n    #.*)+)$",
    re.M,
)


@dataclass(frozen=True)
class Entry:
    """A package of a lock: its version, and the names of those that ask for it."""

    version: str
    asked_by: frozenset[str]


@cache
def constraints() -> dict[str, str]:
    lines = re.findall(r"^([A-Za-z0-9._-]+)==(\S+)$", (HOME / "constraints.txt").read_text("utf-8"), re.M)
    return {canonicalize_name(name): version for name, version in lines}


@cache
def project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((HOME / "pyproject.toml").read_text("utf-8"))
    return found


def declared(*extras: str) -> list[Requirement]:
    """What users install, and what extras add; the project's own name stands for extras of its own."""
    optional = project()["project"]["optional-dependencies"]
    lines = [*project()["project"]["dependencies"], *(each for name in extras for each in optional[name])]
    found = [Requirement(line) for line in lines]
    assert all(each.extras <= set(optional) for each in found if each.name == OWN)
    return [each for each in found if each.name != OWN]


@cache
def lock(file: str) -> dict[str, Entry]:
    """A lock's packages. Raises AssertionError for a line that is not a package with hashes, or a remark."""
    text = (HOME / "locks" / file).read_text("utf-8")
    entries = {}
    for match in ENTRY.finditer(text):
        via = re.findall(r"#\s+(?:via )?(\S.*)$", match["via"], re.M)
        asked_by = frozenset(each for each in via if each != "via" and not each.startswith("-c "))
        entries[match["name"]] = Entry(match["version"], asked_by)
    rest = [line for line in ENTRY.sub("", text).splitlines() if line and not line.startswith("#")]
    assert rest == []
    return entries


ALL = tuple(project()["project"]["optional-dependencies"])


@pytest.mark.parametrize("requirement", sorted(set(declared(*ALL)), key=str), ids=str)
def test_a_dependency_is_locked_in_its_range(requirement: Requirement) -> None:
    assert requirement.specifier.contains(constraints()[canonicalize_name(requirement.name)])


def test_the_image_lock_has_exactly_the_declared_dependency_closure() -> None:
    found = lock("image.txt")
    asked = {
        canonicalize_name(each.name)
        for each in declared(*EXTRAS)
        if each.marker is None or each.marker.evaluate({"sys_platform": "linux", "python_version": "3.11"})
    }
    ours = f"{OWN} (pyproject.toml)"
    assert {name for name, entry in found.items() if ours in entry.asked_by} == asked
    needed: set[str] = set(asked)
    while more := {name for name, entry in found.items() if entry.asked_by & needed} - needed:
        needed |= more
    assert set(found) == needed


def test_the_image_lock_has_the_tested_versions() -> None:
    assert {name: entry.version for name, entry in lock("image.txt").items()}.items() <= constraints().items()


def test_the_build_lock_has_the_projects_build_requirements() -> None:
    lines = (HOME / "locks" / "build.in").read_text("utf-8").splitlines()
    asked = [Requirement(line.partition("#")[0]) for line in lines if line.partition("#")[0].strip()]
    assert [str(each) for each in asked if each.name == "maturin"] == [
        str(Requirement(each)) for each in project()["build-system"]["requires"]
    ]
    found = lock("build.txt")
    assert set(found) == {each.name for each in asked}
    assert all(each.specifier.contains(found[each.name].version) for each in asked)
    assert found["maturin"].version == constraints()["maturin"]


def test_the_same_nats_server_version_is_pinned_everywhere() -> None:
    """pyproject.toml names it; its lock, the chart and the compose file have the same."""
    optional = project()["project"]["optional-dependencies"]
    (pinned,) = (Requirement(each) for each in optional["nats-server"])
    ((operator, version),) = ((each.operator, each.version) for each in pinned.specifier)
    assert operator == "=="
    assert f"{OWN}[nats-server]" in optional["dev"]
    assert {name: entry.version for name, entry in lock("nats-server.txt").items()} == {pinned.name: version}
    values = yaml.safe_load((HOME / "deploy" / "helm" / "kvrouter" / "values.yaml").read_text())
    compose = yaml.safe_load((HOME / "examples" / "compose" / "compose.yaml").read_text())
    assert f"nats-server {version}" in (HOME / "docs" / "install.md").read_text("utf-8")
    images = [values["nats"]["image"], compose["services"]["nats"]["image"]]
    assert images == [f"docker.io/library/nats:{version}"] * 2

"""What must hold of the image, read from its Containerfile: no engine builds it here."""

import json
import re
from functools import cache
from pathlib import Path

import pytest
import yaml

from tests.support.chart import CHART, pods_of, rendered

ROOT = Path(__file__).parents[2]


@cache
def stages() -> dict[str, list[tuple[str, str]]]:
    """The instructions of each stage by its name; the last one's is empty."""
    text = re.sub(r"\\\n", "", (ROOT / "Containerfile").read_text())
    found: dict[str, list[tuple[str, str]]] = {"before": []}
    name = "before"
    for line in text.splitlines():
        word, _, rest = line.strip().partition(" ")
        if not word or word.startswith("#"):
            continue
        if word == "FROM":
            name = rest.partition(" AS ")[2]
            found[name] = []
        found[name].append((word, rest))
    return found


def of(stage: str, word: str) -> list[str]:
    return [rest for each, rest in stages()[stage] if each == word]


def test_the_last_stage_holds_python_and_the_environment_alone() -> None:
    assert list(stages()) == ["before", "wheel", "environment", ""]
    assert of("environment", "FROM")[0].split()[0] == of("", "FROM")[0]
    assert "python:${PYTHON}-slim" in of("", "FROM")[0]
    assert of("", "RUN") == []
    assert of("", "COPY") == [
        "--from=environment /opt/kvrouter /opt/kvrouter",
        "LICENSE /opt/kvrouter/LICENSE",
    ]


def test_it_runs_kvrouter_without_a_shell_as_the_user_of_every_manifest() -> None:
    assert json.loads(of("", "ENTRYPOINT")[0]) == ["kvrouter"]
    assert "PATH=/opt/kvrouter/bin:$PATH" in of("", "ENV")[0]
    (user,) = of("", "USER")
    users = {
        (spec["securityContext"]["runAsUser"], spec["securityContext"]["runAsGroup"])
        for spec in pods_of(rendered({"nats": {"enabled": True}}))
    }
    assert {f"{uid}:{gid}" for uid, gid in users} == {user}


def test_whatever_is_copied_is_there_and_let_through() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in lines
    let_through = {line.removeprefix("!") for line in lines if line.startswith("!")}
    copied = {
        path
        for stage in stages()
        for rest in of(stage, "COPY")
        if not rest.startswith("--from")
        for path in rest.split()[:-1]
    }
    assert copied == let_through
    assert all((ROOT / path).exists() for path in copied)
    assert {"native/target", "**/*.so", "**/__pycache__"} <= set(lines)


def test_nothing_that_the_wheel_is_built_from_is_missing() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    for key in ("readme", "manifest-path", "python-source"):
        (path,) = re.findall(rf'^{key} = "([^"]+)"', project, re.MULTILINE)
        assert path.split("/")[0] in {word for rest in of("wheel", "COPY") for word in rest.split()}
    assert 'license-files = ["LICENSE"]' in project
    (requirement,) = re.findall(r'requires = \["(maturin[^"]+)"\]', project)
    assert f'"{requirement}"' in of("wheel", "RUN")[0]
    assert "--locked" in of("wheel", "RUN")[-1]
    assert (ROOT / "native" / "Cargo.lock").exists()
    assert "[kubernetes]" in of("environment", "RUN")[0]


@pytest.mark.parametrize(
    ("argument", "file", "pattern"),
    [
        ("PYTHON", "pyproject.toml", r'requires-python = ">=([\d.]+)"'),
        ("RUST", "native/Cargo.toml", r'rust-version = "([\d.]+)"'),
    ],
)
def test_its_versions_are_no_older_than_what_the_project_needs(
    argument: str, file: str, pattern: str
) -> None:
    given = dict(rest.split("=") for rest in of("before", "ARG"))[argument]
    (needed,) = re.findall(pattern, (ROOT / file).read_text())
    assert [int(part) for part in given.split(".")] >= [int(part) for part in needed.split(".")]


def test_manifests_and_page_name_the_same_image() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    repository = values["image"]["repository"]
    source = re.findall(r'image\.source="https://github\.com/([^"]+)"', of("", "LABEL")[0])
    assert repository == f"ghcr.io/{source[0]}"

"""What must hold of the image, read from its Containerfile; `make test-image` builds it."""

import json
import re
from functools import cache
from pathlib import Path

import pytest
import yaml

from scripts.write_locks import NO_WHEEL, PYTHON
from tests.testing.helm_chart import CHART, pods_of, rendered

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


def test_the_last_image_stage_has_only_python_and_the_environment() -> None:
    assert list(stages()) == ["before", "tools", "wheel", "environment", ""]
    assert [of(stage, "FROM")[0].split()[0] for stage in ("tools", "environment", "")] == [
        "${PYTHON_IMAGE}",
        "tools",
        "${PYTHON_IMAGE}",
    ]
    assert of("", "RUN") == []
    assert of("", "COPY") == [
        "--from=environment /opt/kvrouter /opt/kvrouter",
        "LICENSE /opt/kvrouter/LICENSE",
    ]


def test_the_image_runs_kvrouter_as_the_manifests_user() -> None:
    assert json.loads(of("", "ENTRYPOINT")[0]) == ["kvrouter"]
    assert "PATH=/opt/kvrouter/bin:$PATH" in of("", "ENV")[0]
    (user,) = of("", "USER")
    users = {
        (spec["securityContext"]["runAsUser"], spec["securityContext"]["runAsGroup"])
        for spec in pods_of(rendered({"nats": {"enabled": True}}))
    }
    assert {f"{uid}:{gid}" for uid, gid in users} == {user}


def test_copied_paths_exist_and_pass_dockerignore() -> None:
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


def test_the_wheel_stage_copies_all_build_inputs() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    for key in ("readme", "manifest-path", "python-source"):
        (path,) = re.findall(rf'^{key} = "([^"]+)"', project, re.MULTILINE)
        assert path.split("/")[0] in {word for rest in of("wheel", "COPY") for word in rest.split()}
    assert 'license-files = ["LICENSE"]' in project
    assert of("wheel", "RUN") == ["maturin build --release --locked --out /wheels"]
    assert (ROOT / "native" / "Cargo.lock").exists()


def installs() -> list[str]:
    """The words after each ``pip install``, and after ``pip --python … install``."""
    found = [
        part
        for stage in stages()
        for run in of(stage, "RUN")
        for part in run.split("&&")
        if re.search(r"\bpip\b", part)
    ]
    return [match[1] for part in found if (match := re.search(r"\binstall (.*)", part))]


def test_packages_come_only_from_the_locks() -> None:
    locked = [rest for rest in installs() if "--requirement" in rest]
    assert {re.findall(r"--requirement (\S+)", rest)[0] for rest in locked} == {
        "/locks/build.txt",
        "/locks/image.txt",
    }
    for rest in locked:
        assert {"--require-hashes", "--only-binary"} <= set(rest.split())
    source = [rest for rest in locked if "--no-binary" in rest]
    assert [f"--no-binary {NO_WHEEL}" in rest and "--no-build-isolation" in rest for rest in source] == [True]
    (own,) = (rest for rest in installs() if "--requirement" not in rest)
    assert {"--no-deps", "--no-index", "/wheels/*.whl"} <= set(own.split())
    assert not any("apt" in run for stage in stages() for run in of(stage, "RUN"))


@pytest.mark.parametrize(
    ("argument", "file", "pattern"),
    [
        ("PYTHON_IMAGE", "pyproject.toml", r'requires-python = ">=([\d.]+)"'),
        ("RUST_IMAGE", "native/Cargo.toml", r'rust-version = "([\d.]+)"'),
    ],
)
def test_base_images_are_exact_and_new_enough(argument: str, file: str, pattern: str) -> None:
    image = dict(rest.split("=") for rest in of("before", "ARG"))[argument]
    match = re.fullmatch(
        r"docker\.io/library/\w+:(\d+\.\d+\.\d+)-slim-bookworm(@sha256:[0-9a-f]{64})?", image
    )
    assert match is not None
    (needed,) = re.findall(pattern, (ROOT / file).read_text())
    assert [int(part) for part in match[1].split(".")] >= [int(part) for part in needed.split(".")]
    assert image.partition("@")[0] in (ROOT / "docs" / "install.md").read_text()
    if argument == "PYTHON_IMAGE":
        assert match[1].startswith(f"{PYTHON}.")


def test_the_chart_and_containerfile_name_the_same_image() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    repository = values["image"]["repository"]
    source = re.findall(r'image\.source="https://github\.com/([^"]+)"', of("", "LABEL")[0])
    assert repository == f"ghcr.io/{source[0]}"

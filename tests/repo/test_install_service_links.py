"""No pod that the repository renders gets variables of Services: some may be called as we are. Where one
opens a front door to others, its admin routes are closed, or ask for a token.
"""

from pathlib import Path

import pytest
import yaml

from tests.testing.helm_chart import SHAPES, pods_of, shape

ROOT = Path(__file__).parents[2]
FILES = sorted(
    str(path.relative_to(ROOT))
    for folder in ("deploy/kustomize", "examples")
    for path in (ROOT / folder).rglob("*.yaml")
    if "kind: " in path.read_text()
)


@pytest.mark.parametrize("name", SHAPES)
def test_pods_of_the_chart_disable_service_links(name: str) -> None:
    pods = pods_of(shape(name))
    assert pods
    assert [pod for pod in pods if pod.get("enableServiceLinks") is not False] == []


def test_pods_of_other_manifests_disable_service_links() -> None:
    pods = {file: pods_of([each for each in _documents(file) if "kind" in each]) for file in FILES}
    assert sum(len(found) for found in pods.values()) == 8
    for file, found in pods.items():
        assert [pod for pod in found if pod.get("enableServiceLinks") is not False] == [], file


def test_front_doors_of_manifests_close_their_admin_routes() -> None:
    doors = [
        {each["name"]: each for each in container.get("env", [])}
        for file in FILES
        for pod in pods_of([each for each in _documents(file) if "kind" in each])
        for container in pod["containers"]
        if {"up", "frontend", "router"} & {*container.get("command", ()), *container.get("args", ())}
    ]
    assert len(doors) == 1
    for environ in doors:
        assert environ["DYN_ADMIN_ROUTES"]["value"] == "closed"
        assert environ["KVROUTER_ADMIN_TOKEN"]["valueFrom"]["secretKeyRef"]["optional"] is True


def _documents(file: str) -> list[dict[str, object]]:
    found = yaml.safe_load_all((ROOT / file).read_text())
    return [each for each in found if isinstance(each, dict)]

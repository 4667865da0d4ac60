"""What the page on Argo CD, Flux, quotas and meshes names exists; preflight's sample has every definition."""

import re
from pathlib import Path

import pytest
import yaml

from kvrouter.operator.api import Condition, DeploymentStatus
from kvrouter.operator.reconcile.definition import INSTALL, InstalledDefinition, reports
from tests.support.console import steps_of

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "kubernetes-integrations.md").read_text("utf-8")
BLOCKS = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)]
SOURCES = "\n".join(path.read_text("utf-8") for path in (DOCS.parent / "src/kvrouter/operator").rglob("*.py"))


def names_in(model: type[DeploymentStatus] | type[Condition]) -> set[str]:
    return {field.alias or name for name, field in model.model_fields.items()}


def scripts() -> dict[str, str]:
    """The health checks of Argo CD, in Lua, and of Flux, in CEL."""
    (lua,) = (block["data"] for block in BLOCKS if "data" in block)
    (flux,) = (block["spec"] for block in BLOCKS if block.get("kind") == "Kustomization")
    (check,) = flux["healthCheckExprs"]
    return {
        "argo": lua["resource.customizations.health.nvidia.com_DynamoGraphDeployment"],
        "failed": check["failed"],
        "current": check["current"],
    }


@pytest.mark.parametrize("which", ["argo", "failed", "current"])
def test_a_health_check_reads_what_a_status_has(which: str) -> None:
    script = scripts()[which]
    fields = set(re.findall(r"status\.([A-Za-z]+)\b", script.replace("hs.status", "")))
    assert fields - names_in(DeploymentStatus) == set()
    of_conditions = set(re.findall(r"\b(?:condition|c)\.([a-z]+)", script))
    assert of_conditions - names_in(Condition) == set()
    assert "type" in of_conditions
    words = set(re.findall(r"""["']([A-Z][A-Za-z]+)["']""", script)) - {"True"}
    healths = {"Healthy", "Progressing", "Degraded"} if which == "argo" else set()
    assert [word for word in words - healths if f'"{word}"' not in SOURCES] == []


def test_a_health_check_of_argo_cd_is_lua_of_its_form() -> None:
    script = scripts()["argo"]
    opened = re.findall(r"\b(?:then|do)\b", script)
    assert len(opened) == len(re.findall(r"\bend\b", script))
    assert script.rstrip().endswith("return hs")


def test_preflight_is_shown_with_every_definition_after_what_it_needs() -> None:
    steps = steps_of(DOCS / "kubernetes-install.md")
    at = next(index for index, step in enumerate(steps) if "operator preflight" in step.command)
    assert steps[at - 1].command == "pip install 'kvrouter[kubernetes]'"
    shipped = sorted((DOCS.parent / "deploy" / "crds").glob("*.yaml"))
    names = [yaml.safe_load(path.read_text())["metadata"]["name"] for path in shipped]
    shown = {line.partition(": ")[0]: line for line in steps[at].shown}
    assert set(shown) == set(names)
    found = reports([InstalledDefinition(name, None) for name in names])
    assert {shown[report.name] for report in found} == {
        f"{name}: not installed yet: {INSTALL}" for name in names
    }

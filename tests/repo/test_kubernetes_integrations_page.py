"""What the page on Argo CD, Flux, quotas and meshes names exists; preflight's sample has every definition."""

import re
from pathlib import Path

import yaml

from kvrouter.operator.api.deployment import GROUP, KIND
from kvrouter.operator.api.status import Condition, DeploymentStatus
from kvrouter.operator.reconcile.definition import INSTALL, InstalledDefinition, reports
from kvrouter.operator.status.finding import READY, STALLED
from tests.testing.console_examples import steps_of

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "kubernetes-install.md").read_text("utf-8")
BLOCKS = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)]


def names_in(model: type[DeploymentStatus] | type[Condition]) -> set[str]:
    return {field.alias or name for name, field in model.model_fields.items()}


def script() -> str:
    """The health check of Argo CD, in Lua."""
    (data,) = (block["data"] for block in BLOCKS if "data" in block)
    (found,) = data.values()
    assert set(data) == {f"resource.customizations.health.{GROUP}_{KIND}"}
    text: str = found
    return text


def test_the_argo_cd_health_check_reads_existing_status_fields() -> None:
    fields = set(re.findall(r"obj\.status\.([A-Za-z]+)\b", script()))
    assert fields
    assert fields - names_in(DeploymentStatus) == set()
    of_conditions = set(re.findall(r"\bcondition\.([a-z]+)", script()))
    assert "type" in of_conditions
    assert of_conditions - names_in(Condition) == set()
    types = set(re.findall(r'condition\.type == "([A-Za-z]+)"', script()))
    assert types == {READY, STALLED}
    healths = set(re.findall(r'"([A-Z][a-z]+)"', script())) - types - {"True"}
    assert healths == {"Healthy", "Progressing", "Degraded"}


def test_the_argo_cd_health_check_has_balanced_lua_blocks() -> None:
    opened = re.findall(r"\b(?:then|do)\b", script())
    assert len(opened) == len(re.findall(r"\bend\b", script()))
    assert script().rstrip().endswith("return hs")


def test_preflight_is_shown_after_its_install_with_every_definition() -> None:
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

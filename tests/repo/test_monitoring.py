"""Dashboards, alerts and monitors: fresh, about metrics that are there, and each alert with its runbook."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from kubernetes_validate import validate

from kvrouter.operator.plan.plan import plan
from kvrouter.telemetry import Event, OperatorTelemetry, Telemetry
from kvrouter.telemetry.families import MetricSpec
from scripts.monitoring.alerts import GROUPS, Alert
from scripts.monitoring.dashboards import DASHBOARDS
from scripts.monitoring.panels import Dashboard, Panel
from scripts.write_monitoring import COLUMNS, MONITORING, dashboard_json, main, query_of, runbook_url
from tests.testing.helm_chart import Manifest, of_kind, rendered
from tests.testing.planned_deployments import DEFAULTS, FACTS, deployment

ROOT = Path(__file__).parents[2]
ALERTS = [alert for alerts in GROUPS.values() for alert in alerts]
PANELS = [(dashboard, panel) for dashboard in DASHBOARDS for panel in dashboard.panels]
OF_TARGETS = {"namespace", "job", "instance"}
"""Labels that Prometheus gives what it scrapes."""

SELECTED = re.compile(r"\b(kvrouter_\w+)(?:\{([^}]*)\})?")
GROUPED = re.compile(r"\b(?:by|on) \(([^)]*)\)")
LABEL = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")


def specs() -> dict[str, MetricSpec]:
    """Each name of a series, with the metric that has it."""
    found = {}
    for spec in (*Telemetry.SPECS, *OperatorTelemetry.SPECS):
        ends = ("_bucket", "_sum", "_count") if spec.kind == "histogram" else ("",)
        found.update({f"{spec.name}{end}": spec for end in ends})
    return found


def mistakes(expr: str, known: Mapping[str, MetricSpec]) -> Iterator[str]:
    """What an expression asks for and no metric has."""
    carried = set(OF_TARGETS)
    for name, selector in SELECTED.findall(expr):
        if name not in known:
            yield name
            continue
        labels = {*known[name].labels, *OF_TARGETS}
        if name.endswith("_bucket"):
            labels.add("le")
        carried |= labels
        yield from (f"{name}{{{label}}}" for label in LABEL.findall(selector) if label not in labels)
    for grouped in GROUPED.findall(expr):
        yield from (label for label in map(str.strip, grouped.split(",")) if label and label not in carried)


def test_generated_monitoring_files_are_fresh() -> None:
    assert main(["--check"]) == 0


def test_unknown_metrics_and_labels_are_found() -> None:
    known = specs()
    wrong = 'sum by (mode) (rate(kvrouter_requests_total{model="x",stat="5"}[5m])) > kvrouter_request_total'
    assert [*mistakes(wrong, known)] == ["kvrouter_requests_total{stat}", "kvrouter_request_total", "mode"]
    assert [*mistakes("kvrouter_queue_wait_seconds", known)] == ["kvrouter_queue_wait_seconds"]


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_alerts_use_existing_metrics_and_labels(alert: Alert) -> None:
    assert [*mistakes(alert.expr, specs())] == []
    grouped = {label.strip() for labels in GROUPED.findall(alert.expr) for label in labels.split(",")}
    for text in (alert.summary, alert.description):
        assert set(re.findall(r"\$labels\.(\w+)", text)) <= grouped, text
        assert text.endswith(".")


@pytest.mark.parametrize(
    ("dashboard", "panel"), PANELS, ids=[f"{dashboard.uid}: {panel.title}" for dashboard, panel in PANELS]
)
def test_panels_use_existing_metrics_and_labels(dashboard: Dashboard, panel: Panel) -> None:
    assert panel.description.endswith(".")
    for query in panel.queries:
        expr = query_of(query.expr, dashboard)
        assert "@" not in expr
        assert [*mistakes(expr, specs())] == []
        grouped = {label.strip() for labels in GROUPED.findall(expr) for label in labels.split(",")}
        assert set(re.findall(r"{{(\w+)}}", query.legend)) <= grouped


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard.uid)
def test_panels_do_not_overlap_and_use_existing_variables(dashboard: Dashboard) -> None:
    found = dashboard_json(dashboard)
    cells = [
        (x, y)
        for panel in found["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < COLUMNS
    assert len({panel["title"] for panel in found["panels"]}) == len(found["panels"])
    variables = {variable["name"] for variable in found["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(found)))
    assert used - {"__all", "__rate_interval"} == variables
    for label, metric in dashboard.variables:
        assert label in {*specs()[metric].labels, *OF_TARGETS}


def test_alerts_and_runbook_sections_match() -> None:
    page = (ROOT / "docs" / "monitoring.md").read_text("utf-8")
    assert re.findall(r"^### (\w+)$", page, re.MULTILINE) == [alert.name for alert in ALERTS]
    for alert in ALERTS:
        section = page.partition(f"### {alert.name}\n")[2].partition("\n#")[0]
        for part in ("**Means**", "**Users see**", "**Look at**", "**Do**"):
            assert section.count(part) == 1, (alert.name, part)
        assert f"`{alert.severity}`" in section
        assert runbook_url(alert).endswith(f"/docs/monitoring.md#{alert.name.lower()}")


def test_metrics_and_log_events_named_in_runbooks_exist() -> None:
    page = (ROOT / "docs" / "monitoring.md").read_text("utf-8")
    mentions = re.findall(r"log events? ([^;.]+)", page)
    events = {name for mention in mentions for name in re.findall(r"`(\w+)`", mention)}
    assert events - {event.value for event in Event} == set()
    assert len(events) > 20
    known = {spec.name for spec in (*Telemetry.SPECS, *OperatorTelemetry.SPECS)}
    assert {name for name in re.findall(r"\bkvrouter_\w+", page) if name not in known} == set()


ON = {"frontendMonitor": True, "engineMonitor": True, "alerts": True, "dashboards": True}


def test_the_chart_renders_alerts_and_dashboards_only_if_enabled() -> None:
    kinds = ("PrometheusRule", "PodMonitor", "ConfigMap", "ServiceMonitor")
    assert not [each for kind in kinds for each in of_kind(rendered(), kind)]
    manifests = rendered({"metrics": {**ON, "serviceMonitor": {"labels": {"release": "prometheus"}}}})
    (rule,) = of_kind(manifests, "PrometheusRule")
    assert rule["spec"] == yaml.safe_load((MONITORING / "alerts.yaml").read_text())
    found = {name: text for each in of_kind(manifests, "ConfigMap") for name, text in each["data"].items()}
    files = {path.name: json.loads(path.read_text()) for path in (MONITORING / "dashboards").iterdir()}
    assert {name: json.loads(text) for name, text in found.items()} == files
    for each in of_kind(manifests, "ConfigMap"):
        assert each["metadata"]["labels"]["grafana_dashboard"] == "1"
        validate(each, "1.30", strict=True)
    for kind in ("PrometheusRule", "PodMonitor", "ServiceMonitor"):
        (each,) = of_kind(manifests, kind)
        assert each["metadata"]["labels"]["release"] == "prometheus"


def test_monitors_select_the_objects_that_the_operator_plans() -> None:
    planned = plan(deployment(types=("frontend", "prefill", "decode")), FACTS, DEFAULTS).manifests
    manifests = cast("list[Manifest]", [*planned])
    monitored = rendered({"metrics": ON})
    (frontends,), (engines,) = (of_kind(monitored, kind) for kind in ("ServiceMonitor", "PodMonitor"))
    services = [each for each in of_kind(manifests, "Service") if _selects(frontends, each)]
    (service,) = services
    (endpoint,) = frontends["spec"]["endpoints"]
    assert endpoint["port"] in [port["name"] for port in service["spec"]["ports"]]
    assert endpoint["honorLabels"]
    pods = [each["spec"]["template"] for each in of_kind(manifests, "Deployment")]
    kinds = {pod["metadata"]["labels"]["kvrouter.dev/component-type"]: _selects(engines, pod) for pod in pods}
    assert kinds == {"frontend": False, "prefill": True, "decode": True}
    one = rendered({"metrics": ON, "watchNamespace": "fleets", "rbac": {"nodes": False}})
    for kind in ("ServiceMonitor", "PodMonitor"):
        (each,) = of_kind(one, kind)
        assert each["spec"]["namespaceSelector"] == {"matchNames": ["fleets"]}


def _selects(monitor: Manifest, thing: Mapping[str, Any]) -> bool:
    selector, labels = monitor["spec"]["selector"], thing["metadata"]["labels"]
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        labels.get(each["key"]) in each["values"] for each in selector.get("matchExpressions", [])
    )

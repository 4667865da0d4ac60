"""Write what ``deploy/monitoring`` and the Helm chart hold for Prometheus and Grafana: alerts and dashboards.

``python -m scripts.write_monitoring`` writes them from ``scripts/monitoring``; with ``--check`` it writes
nothing, names each file that is not what they say, and exits 1 when there is one.
"""

import json
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from scripts.generated_files import write_or_check
from scripts.monitoring.alerts import GROUPS, Alert
from scripts.monitoring.dashboards import DASHBOARDS
from scripts.monitoring.panels import Dashboard, Panel, PanelKind

ROOT = Path(__file__).parents[1]
MONITORING = ROOT / "deploy" / "monitoring"
IN_CHART = ROOT / "deploy" / "helm" / "kvrouter" / "monitoring"
MADE = "# Made by `make docs` from scripts/monitoring: change that, not this file.\n"
YAML_WIDTH = 110

SCHEMA_VERSION = 41
"""Of Grafana 12; later ones read it and bring it up to date."""

COLUMNS = 24
PANEL_HEIGHT, NUMBER_HEIGHT = 8, 4
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}

Json = dict[str, Any]


def rules() -> Json:
    """Return the alerts as a file of rules that Prometheus reads."""
    groups = [{"name": name, "rules": [_rule(alert) for alert in alerts]} for name, alerts in GROUPS.items()]
    return {"groups": groups}


def runbook_url(alert: Alert) -> str:
    """Return where the section about an alert is."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return f"{project['urls']['Documentation']}/monitoring.md#{alert.name.lower()}"


def dashboard_json(dashboard: Dashboard) -> Json:
    """Return a dashboard as Grafana imports it."""
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "tags": ["kvrouter"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": [_datasource(), *_variables(dashboard)]},
        "annotations": {"list": []},
        "links": [
            {
                "title": "kvrouter",
                "type": "dashboards",
                "tags": ["kvrouter"],
                "asDropdown": True,
                "includeVars": True,
                "keepTime": True,
            }
        ],
        "panels": [*_placed(dashboard)],
    }


def query_of(expr: str, dashboard: Dashboard) -> str:
    """Return a query with Grafana's variables in the place of ours."""
    labels = {name: f'{name}=~"${name}"' for name, _ in dashboard.variables}
    namespace, job = labels["namespace"], labels["job"]
    if "model" in labels:
        fleet, model = f"{namespace},{job}", f"{namespace},{job},{labels['model']}"
    else:  # a deployment's namespace is not the one of the operator that reports it
        fleet = model = namespace
    for name, value in (("@fleet", fleet), ("@model", model), ("@job", job), ("@rate", "$__rate_interval")):
        expr = expr.replace(name, value)
    return expr


def files() -> dict[Path, Callable[[], str]]:
    """Return what writes each file."""
    made: dict[Path, Callable[[], str]] = {
        MONITORING / "alerts.yaml": lambda: MADE + _yaml(rules()),
        IN_CHART / "alerts.yaml": lambda: MADE + _yaml(rules()),
    }
    for dashboard in DASHBOARDS:
        for folder in (MONITORING, IN_CHART):
            made[folder / "dashboards" / f"{dashboard.uid}.json"] = partial(_dashboard_text, dashboard)
    return made


def main(arguments: list[str]) -> int:
    """Write the files, or check them; return the exit code."""
    return write_or_check(files(), arguments, script="write_monitoring", root=ROOT)


def _rule(alert: Alert) -> Json:
    return {
        "alert": alert.name,
        "expr": alert.expr.strip("\n"),
        "for": alert.for_,
        "labels": {"severity": alert.severity.value},
        "annotations": {
            "summary": alert.summary,
            "description": alert.description,
            "runbook_url": runbook_url(alert),
        },
    }


def _dashboard_text(dashboard: Dashboard) -> str:
    return json.dumps(dashboard_json(dashboard), indent=1, ensure_ascii=False) + "\n"


def _datasource() -> Json:
    return {
        "name": "datasource",
        "label": "Prometheus",
        "type": "datasource",
        "query": "prometheus",
        "current": {},
        "hide": 0,
    }


def _variables(dashboard: Dashboard) -> Iterator[Json]:
    """A variable for each label; it picks all, also what has no such label, until somebody picks less."""
    above = ""
    for label, metric in dashboard.variables:
        query = f"label_values({metric}{{{above}}}, {label})" if above else f"label_values({metric}, {label})"
        yield {
            "name": label,
            "type": "query",
            "datasource": DATASOURCE,
            "definition": query,
            "query": {"query": query, "refId": label},
            "includeAll": True,
            "allValue": ".*",
            "multi": True,
            "current": {"text": "All", "value": "$__all"},
            "refresh": 2,
            "sort": 1,
        }
        if "model" in dict(dashboard.variables):  # else no metric has both of the labels
            above = f'{above},{label}=~"${label}"'.lstrip(",")


def _placed(dashboard: Dashboard) -> Iterator[Json]:
    """Panels from left to right, in rows that are as high as their first one."""
    x = y = height = 0
    for number, panel in enumerate(dashboard.panels, start=1):
        if x + panel.width > COLUMNS:
            x, y = 0, y + height
        if x == 0:
            height = NUMBER_HEIGHT if panel.kind is PanelKind.NUMBER else PANEL_HEIGHT
        yield _panel(panel, dashboard, number, {"x": x, "y": y, "w": panel.width, "h": height})
        x += panel.width


def _panel(panel: Panel, dashboard: Dashboard, number: int, place: Json) -> Json:
    return {
        "id": number,
        "title": panel.title,
        "description": panel.description,
        "type": panel.kind.value,
        "datasource": DATASOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": _options(panel),
        "targets": [
            {
                "refId": chr(ord("A") + at),
                "datasource": DATASOURCE,
                "expr": query_of(query.expr, dashboard),
                "legendFormat": query.legend or "__auto",
                "range": panel.kind is not PanelKind.TABLE,
                "instant": panel.kind is PanelKind.TABLE,
                "format": {"heatmap": "heatmap", "table": "table"}.get(panel.kind.value, "time_series"),
            }
            for at, query in enumerate(panel.queries)
        ],
    }


def _options(panel: Panel) -> Json:
    match panel.kind:
        case PanelKind.LINES:
            return {
                "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
                "tooltip": {"mode": "multi", "sort": "desc"},
            }
        case PanelKind.NUMBER:
            return {"reduceOptions": {"calcs": ["lastNotNull"]}, "textMode": "value_and_name"}
        case PanelKind.HEATMAP:
            return {"calculate": False, "yAxis": {"unit": panel.unit}}
        case PanelKind.TABLE:
            return {"showHeader": True}


class _Dumper(yaml.SafeDumper):
    """Writes a text of several lines as a block."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def _yaml(document: Json) -> str:
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=YAML_WIDTH, allow_unicode=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

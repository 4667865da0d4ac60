"""Every shipped alert fires in a real Prometheus when what it is about happens, and none without it.

The pages are those of a real ``Telemetry``, whose families a test moves; ``test_faults.py`` causes what can
be caused in a fleet.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.monitoring.alerts import GROUPS
from scripts.write_monitoring import MONITORING
from tests.system.monitoring.pages import (
    EVERYTHING,
    FAULTS,
    FRONTEND_DOWN,
    HEALTHY,
    OPERATOR_FAULTS,
    served_pages,
)
from tests.system.monitoring.prometheus import Prometheus

NAMES = [alert.name for alerts in GROUPS.values() for alert in alerts]
NOT_EXPANDED = ("<no value>", "<error", "%!")


@pytest.fixture(scope="module")
def scraping(prometheus: Prometheus) -> Iterator[Prometheus]:
    """Scrapes a page for each alert, and one of a fleet that is well."""
    names = [HEALTHY, EVERYTHING, *NAMES]
    with served_pages(names) as address:
        for name in names:
            prometheus.scrape(name, address, f"/{name}")
        yield prometheus


def test_each_alert_has_a_fault_in_the_tests() -> None:
    assert sorted(NAMES) == sorted([*FAULTS, *OPERATOR_FAULTS, FRONTEND_DOWN])


@pytest.mark.parametrize("name", NAMES)
def test_a_fault_fires_only_its_own_alert(scraping: Prometheus, name: str) -> None:
    alert = scraping.alertmanager.wait_for(name, name)
    assert scraping.alertmanager.fired(name) == {name}
    assert alert["labels"]["severity"] in ("critical", "warning")
    for text in (alert["annotations"]["summary"], alert["annotations"]["description"]):
        assert not [mark for mark in NOT_EXPANDED if mark in text], text


def test_no_alert_fires_in_a_healthy_fleet(scraping: Prometheus) -> None:
    for name in NAMES:
        scraping.alertmanager.wait_for(name, name)
    assert scraping.query(f'kvrouter_build_info{{namespace="{HEALTHY}"}}')
    assert scraping.alertmanager.fired(HEALTHY) == set()


def test_prometheus_can_evaluate_each_rule(scraping: Prometheus) -> None:
    for name in NAMES:
        scraping.alertmanager.wait_for(name, name)
    rules = scraping.rules()
    assert sorted(rules) == sorted(NAMES)
    assert {name: rule.get("lastError") for name, rule in rules.items() if rule["health"] != "ok"} == {}


@pytest.mark.parametrize(
    "path", sorted((MONITORING / "dashboards").glob("*.json")), ids=lambda path: path.stem
)
def test_each_dashboard_panel_has_data(scraping: Prometheus, path: Path) -> None:
    scraping.alertmanager.wait_for("KvrouterQueueRefusing", EVERYTHING)  # it was scraped several times
    dashboard = json.loads(path.read_text())
    values = {each["name"]: each.get("allValue", "") for each in dashboard["templating"]["list"]}
    values |= {"namespace": EVERYTHING, "__rate_interval": "5s"}
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            expr = target["expr"]
            for name, value in values.items():
                expr = expr.replace(f"${name}", value)
            assert "$" not in expr
            assert scraping.query(expr), (panel["title"], expr)

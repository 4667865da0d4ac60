"""The generated pages: fresh, complete, and the check that keeps them so."""

from pathlib import Path

import pytest

from kvrouter.config.tree import SETTINGS
from kvrouter.telemetry import EVENTS, Telemetry
from scripts.write_docs import PAGES, main


def test_the_pages_in_the_repository_are_fresh() -> None:
    assert main(["--check"]) == 0


def test_a_stale_or_missing_page_fails_the_check_and_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([], tmp_path) == 0
    assert main(["--check"], tmp_path) == 0
    page = tmp_path / "settings.md"
    page.write_text(page.read_text().replace("8000", "8001"))
    (tmp_path / "metrics.md").unlink()
    capsys.readouterr()
    assert main(["--check"], tmp_path) == 1
    assert capsys.readouterr().err.splitlines() == [
        "docs/settings.md: stale, run make docs",
        "docs/metrics.md: stale, run make docs",
    ]
    assert "8001" in page.read_text()
    assert main(["--chekc"], tmp_path) == 2


def test_every_setting_metric_and_event_is_on_its_page() -> None:
    settings, metrics = PAGES["settings.md"](), PAGES["metrics.md"]()
    for spec in SETTINGS:
        assert f"`{spec.variable}` | `{spec.yaml_key}` | {spec.default_text} |" in settings
    for metric in Telemetry.SPECS:
        assert f"`{metric.name}`" in metrics
    for event in EVENTS:
        assert f"`{event.value}`" in metrics

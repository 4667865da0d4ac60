"""The generated pages: fresh, complete, and the check that keeps them so."""

from pathlib import Path

import pytest

from kvrouter.settings.setting_spec import SETTINGS_FILE, written_settings
from kvrouter.settings.tree import SETTINGS
from kvrouter.telemetry import Event, Telemetry
from scripts import write_flags
from scripts.write_docs import DOCS, PAGES, main


def project(root: Path) -> Path:
    """Make a project of empty pages and an index, to which written ones link; return its docs."""
    docs = root / "docs"
    for page in (*DOCS.glob("*.md"), DOCS.parent / "examples" / "fleet.yaml"):
        empty = root / page.relative_to(DOCS.parent)
        empty.parent.mkdir(exist_ok=True)
        empty.touch()
    (docs / "README.md").write_text(" ".join(f"[]({page.name})" for page in DOCS.glob("[!R]*.md")))
    return docs


def test_the_pages_in_the_repository_are_fresh() -> None:
    assert main(["--check"]) == 0


def test_a_stale_or_missing_page_fails_the_check_and_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    docs = project(tmp_path)
    assert main([], docs) == 0
    assert main(["--check"], docs) == 0
    page = docs / "settings.md"
    page.write_text(page.read_text().replace("8000", "8001"))
    (docs / "metrics.md").unlink()
    capsys.readouterr()
    assert main(["--check"], docs) == 1
    assert capsys.readouterr().err.splitlines() == [
        "docs/settings.md: stale, run make docs",
        "docs/metrics.md: stale, run make docs",
        "docs/README.md:1: dead link: metrics.md",
    ]
    assert "8001" in page.read_text()
    assert main(["--chekc"], docs) == 2


def test_a_page_not_in_the_index_exactly_once_fails_the_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    docs = project(tmp_path)
    assert main([], docs) == 0
    (docs / "new.md").touch()
    index = docs / "README.md"
    index.write_text(f"{index.read_text()} [](wire.md)")
    capsys.readouterr()
    assert main(["--check"], docs) == 1
    assert capsys.readouterr().err.splitlines() == [
        "docs/README.md: has new.md 0 times",
        "docs/README.md: has wire.md 2 times",
    ]


LINKED = """# A page

[there](there.md) and [a part of it](there.md#part), [page](#a-page), [elsewhere](https://example.com/x.md),
[a folder](decisions/), [mail](mailto:a@example.com), [spaces](two%20words.md),
[`code`](gone-1.md), ![a picture](gone-2.png),
two [there](there.md) [gone](../gone-3.yaml "with a title").

```python
links[0](not_a_link.md)
```

`[this](is_code.md)`, and [absolute](/there.md).
"""


def test_dead_links_fail_the_check_with_their_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    docs = project(tmp_path)
    (docs / "decisions").mkdir()
    assert main([], docs) == 0
    (docs / "there.md").touch()
    (docs / "two words.md").touch()
    (docs / "page.md").write_text(LINKED)
    index = docs / "README.md"
    index.write_text(f"{index.read_text()} [](there.md) [](two%20words.md) [](page.md)")
    (docs / "decisions" / "0001.md").write_text("[up](../there.md) [gone](there.md)\n")
    (tmp_path / "README.md").write_text("[docs](docs/there.md)\n\n[gone](there.md)\n")
    capsys.readouterr()
    assert main(["--check"], docs) == 1
    assert capsys.readouterr().err.splitlines() == [
        "README.md:3: dead link: there.md",
        "docs/decisions/0001.md:1: dead link: there.md",
        "docs/page.md:5: dead link: gone-1.md",
        "docs/page.md:5: dead link: gone-2.png",
        "docs/page.md:6: dead link: ../gone-3.yaml",
        "docs/page.md:12: dead link: /there.md",
    ]


def test_every_setting_metric_and_event_is_on_its_page() -> None:
    settings, metrics = PAGES["settings.md"](), PAGES["metrics.md"]()
    for spec in SETTINGS:
        assert f"`{spec.variable}` | `{spec.yaml_key}` | {spec.default_text} |" in settings
    for metric in Telemetry.SPECS:
        assert f"`{metric.name}`" in metrics
    for event in Event:
        assert f"`{event.value}`" in metrics


def test_the_flags_table_matches_the_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert written_settings() == SETTINGS
    assert write_flags.main(["--check"]) == 0
    table = tmp_path / "settings.json"
    table.write_text(SETTINGS_FILE.read_text("utf-8").replace("8000", "8001"), "utf-8")
    assert write_flags.main(["--check"], table, tmp_path) == 1
    assert capsys.readouterr().err == "settings.json: stale, run make docs\n"
    assert write_flags.main([], table, tmp_path) == 0
    assert table.read_bytes() == SETTINGS_FILE.read_bytes()

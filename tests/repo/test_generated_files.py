"""Generated files are written, or only compared with what would be written."""

from pathlib import Path

import pytest

from scripts.generated_files import write_or_check


def test_stale_or_missing_files_fail_the_check_and_are_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stale, missing = tmp_path / "kvrouter.yaml", tmp_path / "dashboards" / "made.json"
    stale.write_text("kind: Other\n")

    def run(*arguments: str) -> int:
        files = {stale: lambda: "kind: Made\n", missing: lambda: "{}\n"}
        return write_or_check(files, arguments, script="write_some", root=tmp_path)

    assert run("--check") == 1
    assert capsys.readouterr().err == "".join(
        f"{name}: stale, run make docs\n" for name in ("kvrouter.yaml", "dashboards/made.json")
    )
    assert run() == 0
    assert (stale.read_text(), missing.read_text()) == ("kind: Made\n", "{}\n")
    assert run("--check") == 0
    assert run("--chekc") == 2

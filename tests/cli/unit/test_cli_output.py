"""``--output``: one spelling on every command that prints a result."""

import json
from pathlib import Path

import click
import pytest

from kvrouter.cli import main
from kvrouter.cli.commands import kvrouter
from tests.cli.unit.test_cli_lazy import paths

PRINT_RESULTS = {
    ("calibrate",),
    ("explain",),
    ("fleet", "check"),
    ("fleet", "show"),
    ("operator", "preflight"),
    ("replay",),
    ("top",),
    ("topology", "check"),
    ("worth",),
}


def test_commands_with_a_result_take_output_and_no_other_flag_for_it() -> None:
    with_output = set()
    for path in paths(kvrouter):
        command: click.Command = kvrouter
        for name in path:
            assert isinstance(command, click.Group)
            found = command.get_command(click.Context(command), name)
            assert found is not None
            command = found
        flags = {flag for option in command.params for flag in option.opts}
        assert not flags & {"--json", "--format"}, path
        if "--output" in flags:
            assert "-o" in flags
            with_output.add(path)
    assert with_output >= PRINT_RESULTS


@pytest.mark.parametrize("said", ["yaml", "out.json", "json=", "table=x", "JSON"])
def test_unknown_output_form_is_refused_with_the_known_ones(
    said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["topology", "check", "--output", said]) == 2
    message = f"must be table, json or json=FILE, not {said!r}"
    assert message in capsys.readouterr().err


def test_a_result_is_a_table_or_json_or_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    row = {"timestamp": 0, "input_length": 60, "output_length": 4, "hash_ids": [1]}
    trace.write_text(json.dumps(row) + "\n")
    assert main(["replay", str(trace)]) == 0
    table = capsys.readouterr().out
    assert main(["replay", str(trace), "--output", "json"]) == 0
    printed = capsys.readouterr().out
    assert json.loads(printed)["variants"][0]["name"] == "kvrouter"
    assert main(["replay", str(trace), "-o", f"json={tmp_path / 'out.json'}"]) == 0
    assert capsys.readouterr().out == table
    assert (tmp_path / "out.json").read_text() == printed


def test_topology_check_prints_json_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYN_TOPOLOGY_ENABLED", "true")
    monkeypatch.setenv("DYN_TOPOLOGY_MOUNT_PATH", "/nowhere")
    assert main(["topology", "check", "--output", "json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["config"] is None
    assert report["exit_code"] == 1
    assert report["text"].startswith("A worker would not start")

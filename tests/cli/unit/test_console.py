"""What commands print: whatever others wrote, a terminal obeys none of it."""

import io
import json
from pathlib import Path

import pytest
from rich.table import Table
from rich.text import Text

from kvrouter.cli import main
from kvrouter.cli.console import TextConsole
from kvrouter.cli.output import echo, json_text
from tests.cli.unit.test_cli_calibrate import run  # noqa: F401 - a fixture

EVIL = "a\x1b[31mb\x07\x9b2Jc\x08d\re\u202ef\x7f"
SHOWN = "a�[31mb��2Jc�d�e�f�"


def drawn(*, is_terminal: bool) -> str:
    file = io.StringIO()
    console = TextConsole(file=file, force_terminal=is_terminal, width=100)
    table = Table(title=EVIL, caption=EVIL)
    table.add_column(EVIL)
    table.add_row(Text(EVIL, "bold red"))
    console.print(table)
    console.print(EVIL, markup=False, highlight=False)
    return file.getvalue()


def test_printed_text_contains_no_terminal_control_characters() -> None:
    assert not {"\x1b", "\x07", "\x9b", "\x08", "\u202e", "\x7f"} & set(drawn(is_terminal=False))
    colored = drawn(is_terminal=True)
    assert "\x1b[1;31m" in colored  # its own styles are there
    assert "\x1b[31mb" not in colored
    assert not {"\x07", "\x9b", "\x08", "\u202e", "\x7f"} & set(colored)


def test_lines_are_printed_with_control_characters_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    echo(f"{EVIL}\n\tnext", err=True)
    assert capsys.readouterr().err == f"{SHOWN}\n\tnext\n"


def test_printed_json_keeps_its_values_and_has_only_printable_characters() -> None:
    text = json_text({"name": EVIL})
    assert json.loads(text) == {"name": EVIL}
    assert all(char.isprintable() or char == "\n" for char in text.decode())


def test_command_mistakes_are_printed_without_control_characters(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text('version: 1\n"\\e[31mred\\a": 1\n')
    assert main(["fleet", "check", str(file)]) != 0
    shown = capsys.readouterr().err
    assert "[31mred" in shown
    assert not {"\x1b", "\x07"} & set(shown)


def test_calibrate_prints_a_run_name_without_control_characters(
    run: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    odd = run.rename(run.parent / "run\x1b]0;owned\x07")
    assert main(["calibrate", str(odd), "--requests", "6"]) == 0
    out = capsys.readouterr().out
    assert "owned" in out
    assert not {"\x1b", "\x07"} & set(out)

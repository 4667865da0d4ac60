"""The command line starts at once: a command is imported when it is asked for."""

import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from kvrouter.cli.commands import LAZY, LazyGroup, kvrouter

HEAVY = {"numpy", "pydantic", "msgspec", "rich", "kvrouter._native", "kvrouter.config"}


@pytest.mark.parametrize("name", LAZY)
def test_a_commands_line_in_the_list_is_its_own(name: str) -> None:
    command = kvrouter.get_command(click.Context(kvrouter), name)
    assert command is not None
    assert command.name == name
    assert command.get_short_help_str(limit=200) == LAZY[name].short_help


def test_every_command_is_listed() -> None:
    assert isinstance(kvrouter, LazyGroup)
    shown = CliRunner().invoke(kvrouter, ["--help"]).output
    for name in (*LAZY, "completion"):
        assert f"\n  {name} " in shown
    unknown = CliRunner().invoke(kvrouter, ["nothing"])
    assert "No such command 'nothing'" in unknown.output


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--version"], ["explain", "--help"], ["completion", "bash"], ["fleet", "--help"]],
)
def test_what_serves_nothing_imports_little(arguments: list[str]) -> None:
    run = (
        "import sys\nfrom kvrouter.cli import main\ncode = main(sys.argv[1:])\n"
        "print(code, *sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", run, *arguments], capture_output=True, text=True, check=True)
    code, *modules = done.stderr.split()
    assert code == "0"
    assert done.stdout
    assert not HEAVY & set(modules)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_is_given_its_completion(shell: str) -> None:
    shown = CliRunner().invoke(kvrouter, ["completion", shell])
    assert shown.exit_code == 0
    assert f"_KVROUTER_COMPLETE={shell}_complete" in shown.output


def test_commands_are_completed() -> None:
    asked = {"_KVROUTER_COMPLETE": "bash_complete", "COMP_WORDS": "kvrouter ex", "COMP_CWORD": "1"}
    done = CliRunner().invoke(kvrouter, [], env=asked, prog_name="kvrouter")
    assert done.output.split(",")[-1].strip() == "explain"

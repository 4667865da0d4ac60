"""The command line starts at once: a command is imported when it is asked for."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping

import click
import pytest
from click.testing import CliRunner

from kvrouter.cli import main
from kvrouter.cli.commands import LAZY, LazyGroup, kvrouter

HEAVY = {
    "numpy",
    "pydantic",
    "msgspec",
    "rich",
    "yaml",
    "uvloop",
    "kvrouter._native",
    "kvrouter.settings.tree",
}


@pytest.mark.parametrize("name", LAZY)
def test_listed_help_line_of_a_command_is_its_own(name: str) -> None:
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


def paths(group: click.Group, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The names of every command and group below ``group``."""
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        yield (*above, name)
        if isinstance(command, click.Group):
            yield from paths(command, (*above, name))


def imported(arguments: list[str], environ: Mapping[str, str] | None = None) -> set[str]:
    """The modules that a command line has imported when it ends well."""
    run = (
        "import atexit, sys\natexit.register(lambda: print(*sys.modules, file=sys.stderr))\n"
        "from kvrouter.cli import main\nsys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", run, *arguments],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **(environ or {})},
    )
    assert done.stdout
    return set(done.stderr.split())


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--version"], ["completion", "bash"], *([*path, "--help"] for path in paths(kvrouter))],
    ids=" ".join,
)
def test_help_version_and_completion_import_no_heavy_modules(arguments: list[str]) -> None:
    assert not HEAVY & imported(arguments)


def test_flags_are_completed_without_the_settings_models() -> None:
    asked = {"_KVROUTER_COMPLETE": "bash_complete", "COMP_WORDS": "kvrouter up --http-p", "COMP_CWORD": "2"}
    assert not HEAVY & imported([], asked)
    done = CliRunner().invoke(kvrouter, [], env=asked, prog_name="kvrouter")
    assert done.output == "plain,--http-port\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_the_script_of_the_shell(shell: str) -> None:
    shown = CliRunner().invoke(kvrouter, ["completion", shell])
    assert shown.exit_code == 0
    assert f"_KVROUTER_COMPLETE={shell}_complete" in shown.output


def test_commands_are_completed() -> None:
    asked = {"_KVROUTER_COMPLETE": "bash_complete", "COMP_WORDS": "kvrouter ex", "COMP_CWORD": "1"}
    done = CliRunner().invoke(kvrouter, [], env=asked, prog_name="kvrouter")
    assert done.output.split(",")[-1].strip() == "explain"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["expalin"], "No such command 'expalin'. Did you mean 'explain'?"),
        (["calibrat"], "No such command 'calibrat'. Did you mean 'calibrate'?"),
        (["nothing"], "No such command 'nothing'. kvrouter --help lists the commands."),
        (["fleet", "chek"], "No such command 'chek'. Did you mean 'check'?"),
    ],
)
def test_mistyped_command_is_answered_with_what_may_be_meant(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().err == f"kvrouter: {said}\n"


def test_package_runs_as_a_module() -> None:
    run = [sys.executable, "-m", "kvrouter"]
    version = subprocess.run([*run, "--version"], capture_output=True, text=True, check=True).stdout
    assert version.startswith("kvrouter ")
    assert subprocess.run([*run, "nothing"], capture_output=True, check=False).returncode == 2

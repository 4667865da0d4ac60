"""The commands of ``kvrouter``. Each is imported when it runs, so that the command line starts at once."""

from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

if TYPE_CHECKING:
    from kvrouter.config.fleet import FleetFile
    from kvrouter.config.problems import Problem

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


class LazyCommand(NamedTuple):
    """Where a command is, and its line in the list of commands."""

    module: str
    name: str
    short_help: str


LAZY: Mapping[str, LazyCommand] = {
    "calibrate": LazyCommand(
        "calibrate",
        "calibrate",
        "Fit the timing of mock engines to a measured run of a real one, or to a live one.",
    ),
    "doctor": LazyCommand("doctor", "doctor", "Name what is wrong with a running fleet, and the remedy."),
    "explain": LazyCommand("ask", "explain", "Show where a prompt would go, or a request went, and why."),
    "frontend": LazyCommand("processes", "frontend", "Serve workers that run in other processes."),
    "operator": LazyCommand(
        "operator", "operator", "Look after DynamoGraphDeployments in a Kubernetes cluster."
    ),
    "replay": LazyCommand(
        "replay", "replay", "Replay recorded traffic over a fleet, and compare routing rules."
    ),
    "router": LazyCommand("processes", "router", "Decide for engines that something else fronts."),
    "top": LazyCommand("top", "top", "Show the fleet of a running router, live."),
    "topology": LazyCommand("engines", "topology", "Where a worker is."),
    "up": LazyCommand("up", "up", "Serve a fleet."),
    "worker": LazyCommand("engines", "worker", "Run a worker: an engine, and what makes it part of a fleet."),
    "worth": LazyCommand(
        "worth", "worth", "Say what other transfer policies would change, and whether to switch."
    ),
}
"""The commands by name; a test holds their lines to their own."""


class LazyGroup(click.Group):
    """A group whose commands are imported when they are asked for, and not to list them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        return sorted({*super().list_commands(ctx), *LAZY})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command; None for a name that none has."""
        lazy = LAZY.get(cmd_name)
        if lazy is None:
            return super().get_command(ctx, cmd_name)
        command: click.Command = getattr(import_module(f"kvrouter.cli.{lazy.module}"), lazy.name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands."""
        names = self.list_commands(ctx)
        limit = formatter.width - 6 - max(map(len, names))
        own = {name: command.get_short_help_str(limit) for name, command in self.commands.items()}
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, LAZY[name].short_help if name in LAZY else own[name]) for name in names]
            )


def _show_version(ctx: click.Context, _: click.Parameter, asked: bool) -> None:
    if not asked or ctx.resilient_parsing:
        return
    try:
        installed = version("kvrouter")
    except PackageNotFoundError:
        installed = "source"
    click.echo(f"kvrouter {installed}")
    ctx.exit()


@click.group(cls=LazyGroup, context_settings=CONTEXT)
@click.option(
    "-V",
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_show_version,
    help="Show the version and exit.",
)
def kvrouter() -> None:
    """Route LLM requests to the worker that answers soonest, and keep KV transfers in their domain."""


@kvrouter.command(short_help="Print what completes commands and flags in a shell.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script that completes kvrouter's commands and flags in SHELL.

    For bash: eval "$(kvrouter completion bash)" in ~/.bashrc.
    """
    from click.shell_completion import get_completion_class  # noqa: PLC0415

    found = get_completion_class(shell)
    if found is None:
        raise click.UsageError(f"no completion for {shell} here")
    click.echo(found(kvrouter, {}, "kvrouter", "_KVROUTER_COMPLETE").source())


@kvrouter.group("fleet")
def fleet_group() -> None:
    """Fleet files."""


@fleet_group.command("check")
@click.argument("file", type=click.Path(path_type=Path))
def fleet_check(file: Path) -> None:
    """Validate FILE, its settings and topology contracts too, read the tokenizers that it names, and start
    nothing. All mistakes are shown at once, by line.
    """
    from kvrouter.cli.processes import warn  # noqa: PLC0415
    from kvrouter.config.fleet_checks import load_fleet, settings_in  # noqa: PLC0415
    from kvrouter.config.problems import read_document  # noqa: PLC0415
    from kvrouter.config.sources import conflicts, settings_warnings  # noqa: PLC0415
    from kvrouter.wiring.fleet_build import contract_problems, tokenizer_problems  # noqa: PLC0415

    def setting_problems(fleet: "FleetFile") -> "list[Problem]":
        return conflicts(settings_in(fleet))

    loaded = load_fleet(read_document(file), (setting_problems, contract_problems, tokenizer_problems))
    fleet = loaded.fleet
    warn((*settings_warnings(settings_in(fleet)), *loaded.warnings))
    n_workers = sum(group.n_workers for group in fleet.workers)
    workers = f"{n_workers} worker{'' if n_workers == 1 else 's'}"
    policy = fleet.kv_transfer
    kept = f"KV {policy.enforcement.value} on {policy.domain}" if policy else "no transfer policy"
    names = ", ".join(model.name for model in fleet.models)
    click.echo(f"{file}: good: {workers} for {names}, {kept}")

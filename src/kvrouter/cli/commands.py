"""The commands of ``kvrouter``. Each is imported when it runs, so that the command line starts at once."""

from collections.abc import Mapping
from importlib import import_module
from typing import NamedTuple

import click

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


class LazyCommand(NamedTuple):
    """Where a command is, and its line in the list of commands."""

    module: str
    name: str
    short_help: str


LAZY: Mapping[str, LazyCommand] = {
    "bench": LazyCommand(
        "bench.flags",
        "bench",
        "Compare a running router with round-robin on its own engines, by the same conversations.",
    ),
    "calibrate": LazyCommand(
        "calibrate.flags",
        "calibrate",
        "Fit the timing of mock engines to a measured run of a real one, or to a live one.",
    ),
    "cordon": LazyCommand(
        "cordon.flags", "cordon", "Keep new requests away from a worker, a node or a zone."
    ),
    "doctor": LazyCommand(
        "doctor.flags", "doctor", "Name what is wrong with a running fleet, and the remedy."
    ),
    "drain": LazyCommand("cordon.flags", "drain", "Cordon, and wait until nothing runs there any more."),
    "dry-run": LazyCommand(
        "dry_run.flags", "dry_run", "Say which recorded requests a transfer policy would have refused."
    ),
    "explain": LazyCommand(
        "explain.flags", "explain", "Show where a prompt would go, or a request went, and why."
    ),
    "fleet": LazyCommand("fleet.flags", "fleet", "Write, show and check fleet files."),
    "frontend": LazyCommand("frontend.flags", "frontend", "Serve workers that run in other processes."),
    "hit-rate": LazyCommand(
        "hit_rate.flags",
        "hit_rate",
        "Show where recorded requests lost their cache hits, and what helps.",
    ),
    "operator": LazyCommand(
        "operator.flags", "operator", "Look after DynamoGraphDeployments in a Kubernetes cluster."
    ),
    "replay": LazyCommand(
        "replay.flags", "replay", "Replay recorded traffic over a fleet, and compare routing rules."
    ),
    "router": LazyCommand("router.flags", "router", "Decide for engines that something else fronts."),
    "top": LazyCommand("top.flags", "top", "Show the fleet of a running router, live."),
    "topology": LazyCommand("worker.flags", "topology", "Where a worker is."),
    "uncordon": LazyCommand("cordon.flags", "uncordon", "Take a cordon back."),
    "up": LazyCommand("up.flags", "up", "Serve a fleet."),
    "worker": LazyCommand(
        "worker.flags", "worker", "Run a worker: an engine, and what makes it part of a fleet."
    ),
    "worth": LazyCommand(
        "worth.flags", "worth", "Say what other transfer policies would change, and whether to switch."
    ),
}
"""The commands by name; a test holds their lines to their own."""


class LazyGroup(click.Group):
    """A group that imports a command when it is used, and not to list it."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        return sorted({*super().list_commands(ctx), *LAZY})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command; None for an unknown name."""
        lazy = LAZY.get(cmd_name)
        if lazy is None:
            return super().get_command(ctx, cmd_name)
        command: click.Command = getattr(import_module(f"kvrouter.cli.{lazy.module}"), lazy.name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that ``args`` begin with, and the rest of them; name those that an unknown name
        may mean.
        """
        try:
            return super().resolve_command(ctx, args)
        except click.NoSuchCommand as error:
            names = self.list_commands(ctx)
            meant = click.NoSuchCommand(error.command_name, possibilities=names, ctx=ctx)
            if not meant.possibilities:
                hint = "kvrouter --help lists the commands."
                meant = click.NoSuchCommand(error.command_name, f"{meant.message} {hint}", ctx=ctx)
            raise meant from None

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
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415

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

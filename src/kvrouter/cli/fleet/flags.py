"""``kvrouter fleet``: writes, shows and checks fleet files."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvrouter.cli.ask import plain_console, router_at
from kvrouter.cli.options import takes
from kvrouter.cli.output import Output, echo, json_text
from kvrouter.cli.progress import working
from kvrouter.cli.setting_flags import output_option
from kvrouter.fleetfile.worker_options import EngineUrls
from kvrouter.settings.option import option
from kvrouter.settings.variables import ENGINE_KEY_VARIABLE


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetTemplate:
    """The contents of a new fleet file, besides the engines; with ``zones``, which KV does not leave."""

    model: str | None = option(
        "The model.  [default: mock, or the name under which the engines at --url serve it: they are asked]",
        metavar="NAME",
    )
    zones: tuple[str, ...] = option(
        "A zone with one prefill and two decode workers, with mock engines; KV stays in its zone. Give it "
        "once for each zone. Without any, four workers do both.",
        default=(),
        flag="--zone",
        metavar="NAME",
    )


if TYPE_CHECKING:
    from kvrouter.cli.fleet.check import FleetCheck
    from kvrouter.settings.setting_spec import SettingValue

FILE = click.Path(path_type=Path)
DEFAULT_FILE = Path("fleet.yaml")

GOOD, UNREACHABLE, MISTAKEN = 0, 1, 2
"""Exit codes of ``kvrouter fleet check``."""


@click.group(short_help="Write, show and check fleet files.")
def fleet() -> None:
    """Fleet files: what `kvrouter up --fleet` runs."""


@fleet.command("init", short_help="Write a fleet file to begin with.")
@click.argument("file", type=FILE, default=DEFAULT_FILE)
@takes(EngineUrls, FleetTemplate)
@click.option("--force", is_flag=True, help="Replace FILE where it is there already.")
def fleet_init(engines: EngineUrls, template: FleetTemplate, file: Path, *, force: bool) -> None:
    """Write FILE (fleet.yaml by default) with comments: a fleet that can be run as it is.

    \b
    kvrouter fleet init                               four mock workers
    kvrouter fleet init --zone a --zone b             prefill and decode in two zones
    kvrouter fleet init --engine vllm --url http://10.0.1.1:8000 --url http://10.0.1.2:8000

    Without --model the engines at --url are asked for its name; one that does not answer now is asked when
    the fleet is run. A key that they ask for is read from KVROUTER_ENGINE_API_KEY.
    """
    from kvrouter.cli.fleet.check import summary_of  # noqa: PLC0415
    from kvrouter.cli.fleet.template import write_fleet  # noqa: PLC0415

    with working("asking the engines"):
        written, answers = write_fleet(file, engines, template, os.environ, replace=force)
    for line in (line for answer in answers for line in answer.lines):
        echo(f"kvrouter: {line}", err=True)
    echo(
        f"{file}: written: {summary_of(written)}\n"
        f"Check it: kvrouter fleet check --strict {file}\n"
        f"Run it: kvrouter up --fleet {file}"
    )


@fleet.command("show", short_help="Show what a fleet file means, or a running fleet.")
@click.argument("file", type=FILE, required=False)
@click.option("--url", metavar="URL", help="Show the workers of the router there, instead of FILE.")
@output_option
def fleet_show(file: Path | None, *, url: str | None, output: Output) -> None:
    """Show what FILE (fleet.yaml by default) means after defaults: models, workers with their roles, places
    and room for KV, how many there are in each place, links, and the settings that it sets. Where it says
    "asked", engines are asked.

    With --url: the workers that a running router has, those that are alike in one row. Their load is in
    `kvrouter top`. Where the router has an admin token, it is read from KVROUTER_ADMIN_TOKEN.
    """
    if file is not None and url is not None:
        raise click.UsageError("give FILE, or --url URL, and not both")
    from kvrouter.cli.fleet.show import draw_fleet, file_shown, running_shown  # noqa: PLC0415
    from kvrouter.fleetfile.fleet_checks import load_fleet  # noqa: PLC0415
    from kvrouter.settings.problems import read_document  # noqa: PLC0415

    if url is None:
        file = file or _default_file("give FILE, or --url URL")
        shown = file_shown(str(file), load_fleet(read_document(file)).fleet)
    else:
        from kvrouter.api.client import decode_answer  # noqa: PLC0415
        from kvrouter.api.fleet_schema import Fleet  # noqa: PLC0415

        with working(f"asking {url}"):
            answer = router_at(url).fleet()
        shown = running_shown(url, decode_answer(answer, Fleet))
    output.show(lambda: json_text(shown), lambda: draw_fleet(shown, plain_console()))


@fleet.command("check", short_help="Validate a fleet file, and start nothing.")
@click.argument("file", type=FILE, required=False)
@click.option(
    "--strict",
    is_flag=True,
    help="Take warnings for mistakes, and look for more: levels and links of places where no worker is, "
    "addresses that are one, and hosts named as in examples.",
)
@click.option(
    "--connect",
    is_flag=True,
    help="Ask every engine that runs already what it is, and compare: model, block size, context length, "
    f"ranks. A key that they ask for is read from {ENGINE_KEY_VARIABLE}, or from where FILE says.",
)
@click.option(
    "--no-kv-events",
    is_flag=True,
    help="Check FILE for kvrouter up --no-kv-events. Settings in variables count as they do there.",
)
@output_option
def fleet_check(
    file: Path | None, *, strict: bool, connect: bool, no_kv_events: bool, output: Output
) -> None:
    """Validate FILE (fleet.yaml by default), its settings and topology contracts too, read the tokenizers
    that it names, and start nothing. All mistakes are shown at once, by line.

    It ends with 0 for a good file, with 2 for one with mistakes, and with 1 where nothing is wrong but that
    an engine does not answer (--connect).
    """
    from kvrouter.cli.fleet.check import check_fleet  # noqa: PLC0415

    file = file or _default_file("give FILE")
    with working(f"checking {file}"):
        flags: dict[str, SettingValue] = {"router.kv_events": False} if no_kv_events else {}
        found = check_fleet(file, strict=strict, connect=connect, environ=os.environ, flags=flags)
    output.show(lambda: json_text(found), lambda: _show_check(found, strict=strict))
    if found.is_good:
        sys.exit(GOOD)
    is_mistaken = any(not mistake.is_unreachable for mistake in found.mistakes)
    sys.exit(MISTAKEN if is_mistaken or (strict and found.warnings) else UNREACHABLE)


def _default_file(otherwise: str) -> Path:
    """Return the fleet file of the current folder; without one, a mistake says what to do ``otherwise``."""
    if not DEFAULT_FILE.exists():
        raise click.UsageError(
            f"no {DEFAULT_FILE} in this folder: {otherwise}; kvrouter fleet init writes a file to begin with"
        )
    return DEFAULT_FILE


def _show_check(found: "FleetCheck", *, strict: bool) -> None:
    for mistake in found.mistakes:
        echo(f"kvrouter: {mistake.shown(found.file)}", err=True)
    for warning in found.warnings:
        echo(f"kvrouter: {found.file if strict else 'warning'}: {warning}", err=True)
    if found.is_good:
        echo(f"{found.file}: good: {found.summary}")

"""``kvrouter fleet``: fleet files."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from kvrouter.config.fleet import FleetFile
    from kvrouter.config.problems import Problem


@click.group("fleet")
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

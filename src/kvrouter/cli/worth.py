"""``kvrouter worth``."""

import sys
from pathlib import Path

import click

from kvrouter.cli.ask import plain_console
from kvrouter.cli.replay_options import FILE, replay_options
from kvrouter.commands.input_options import InputOptions
from kvrouter.config.setting_spec import written_setting
from kvrouter.core.cost_rules import cost_choices


@click.command(short_help="Say what other transfer policies would change, and whether to switch.")
@click.argument("trace", type=FILE)
@click.option("--fleet", type=FILE, metavar="FILE", required=True, help="The fleet as it is, with its links.")
@click.option(
    "--mode",
    "modes",
    multiple=True,
    type=click.Choice(written_setting("router.router_mode").choices),
    help="Compare this router mode; give it again for more.  [default: all of them]",
)
@click.option(
    "--cost",
    "costs",
    multiple=True,
    type=click.Choice(cost_choices()),
    help="In mode kv, compare this cost; joint is time, the pair picked together. Give it again for more.  "
    "[default: blocks, time and joint]",
)
@click.option(
    "--threshold",
    type=float,
    default=2.0,
    show_default=True,
    metavar="PERCENT",
    help="No gain below it is worth a change.",
)
@replay_options(seeds=5, seeds_help="Replay with so many seeds, where they change anything.")
def worth(
    *, fleet: Path, modes: tuple[str, ...], costs: tuple[str, ...], threshold: float, given: InputOptions
) -> None:
    """Replay TRACE over the fleet as it is, and with every other enforcement, level, router mode and cost;
    show what each would change in TTFT, goodput, failures, bytes that cross and money, and give advice, which
    may be "leave it".

    TRACE is whatever `kvrouter replay` reads, recordings too. The same seeds give the same figures.
    """

    from kvrouter.commands.worth import WorthOptions  # noqa: PLC0415
    from kvrouter.commands.worth import worth as run  # noqa: PLC0415
    from kvrouter.core.constraints import RouterMode  # noqa: PLC0415

    options = WorthOptions(
        inputs=given,
        fleet=fleet,
        modes=tuple(dict.fromkeys(map(RouterMode, modes))),
        threshold=threshold / 100.0,
        costs=tuple(dict.fromkeys(costs)),
    )
    sys.exit(run(options, plain_console()))

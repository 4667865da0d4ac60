"""The options that every command has which replays traffic."""

from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from pathlib import Path
from typing import Any

import click

from kvrouter.cli.flags import output_option
from kvrouter.commands.input_options import InputOptions

FILE = click.Path(path_type=Path)


def _options(seeds: int, seeds_help: str) -> tuple[Callable[[Callable[..., None]], Callable[..., None]], ...]:
    return (
        click.option(
            "--model", metavar="NAME", help="The model of a recording; may be left out where it has one."
        ),
        click.option(
            "--trace-format",
            type=click.Choice(["mooncake", "mooncake-delta"]),
            help="What Mooncake's rows with session_id have: whole prompts, or only what a turn adds. Needed "
            "where the rows do not show it.",
        ),
        click.option(
            "--dispatch",
            type=click.Choice(["timestamp", "closed"]),
            default="timestamp",
            show_default=True,
            help="When requests arrive: as the trace says, or each turn its think time after the answers "
            "that it waits for.",
        ),
        click.option(
            "--speedup",
            type=float,
            default=1.0,
            show_default=True,
            help="By time stamp, so many times as fast.",
        ),
        click.option("--rows", type=click.IntRange(min=1), metavar="N", help="Only the first requests."),
        click.option(
            "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="What is drawn from."
        ),
        click.option(
            "--seeds", type=click.IntRange(1, 100), default=seeds, show_default=True, help=seeds_help
        ),
        click.option("--timing", type=FILE, metavar="FILE", help="The timing of every engine, in YAML."),
        click.option(
            "--events",
            type=FILE,
            metavar="FILE",
            help="What happens to workers, links and policies meanwhile, in YAML; or `none`, or `recorded`: "
            "what a recording says of its fleet. That is the default where the fleet has the same workers.",
        ),
        click.option(
            "--slo-ttft",
            type=float,
            default=2.0,
            show_default=True,
            help="Seconds in which a good answer begins.",
        ),
        click.option(
            "--slo-itl",
            type=float,
            default=0.05,
            show_default=True,
            help="Mean seconds between its tokens, at most.",
        ),
        output_option,
    )


def replay_options(*, seeds: int, seeds_help: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command these options; it takes what was given of them and its trace as ``given``."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def collect(*args: object, **values: Any) -> None:
            given = InputOptions(**{field.name: values.pop(field.name) for field in fields(InputOptions)})
            command(*args, given=given, **values)

        decorated: Callable[..., None] = collect
        for option in reversed(_options(seeds, seeds_help)):
            decorated = option(decorated)
        return decorated

    return decorate

"""``kvrouter doctor``: what is wrong with a running fleet, why it matters, and what ends it."""

import os
from dataclasses import dataclass
from pathlib import Path

import click

from kvrouter.cli.ask import RouterOptions, plain_console
from kvrouter.cli.options import takes
from kvrouter.cli.output import TABLE, Output, echo, json_text
from kvrouter.cli.progress import working
from kvrouter.settings.option import option


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorOptions(RouterOptions):
    """The examined part of a fleet, and the period. ``over_s``: counts are taken over this time; None for all
    since the router began. An engine may take ``timeout_s`` for each answer.
    """

    replicas: tuple[str, ...] = option(
        "Another router of the same fleet, to be compared with it; may be given more than once.",
        default=(),
        flag="--replica",
        metavar="URL",
    )
    over_s: float | None = option(
        "Count what happens in this time, and not all since the router began.",
        metavar="SECONDS",
        above=0,
        at_most=3600,
    )
    engines: bool = option(
        "Ask engines too: what they are, what time they have, how they tokenize.  [default: engines]",
        default=True,
        hides_default=True,
    )
    timeout_s: float = option(
        "How long the router, or an engine, may take for an answer.",
        default=10.0,
        metavar="SECONDS",
        above=0,
        at_most=600,
    )
    recording: Path | None = option(
        "A recording of its traffic: show where cache hits were lost too, as kvrouter hit-rate does.",
        metavar="RECORDING",
    )
    model: str | None = option("Whose hits; may be left out where one is recorded.", metavar="NAME")
    output: Output = TABLE


CANNOT_ASK = 2
"""The exit code where the router could not be asked."""


@click.command(short_help="Name what is wrong with a running fleet, and the remedy.")
@takes(DoctorOptions)
def doctor(options: DoctorOptions) -> None:
    """Check a running fleet: ask its router, and its engines where they can be reached, and name everything
    that is wrong with what was seen of it, why it matters, and the remedy. Each check says what it compared;
    checks with too little data, and those that could not be made, are listed with the reason. Nothing is
    changed; engines get a short text to tokenize.

    Exit code: 0 where nothing is wrong (notes are no problems), 1 for problems, 2 where the router could not
    be asked, or RECORDING could not be read.

    Where the router has an admin token, it is read from KVROUTER_ADMIN_TOKEN.
    """
    if options.model is not None and options.recording is None:
        raise click.UsageError("--model is about RECORDING: give --recording too")
    import asyncio  # noqa: PLC0415

    import msgspec  # noqa: PLC0415

    from kvrouter.api.client import RouterClient  # noqa: PLC0415
    from kvrouter.cli.doctor.diagnosis import diagnose  # noqa: PLC0415
    from kvrouter.cli.doctor.report import drawn  # noqa: PLC0415
    from kvrouter.cli.hit_rate.run import hit_rate_of, show_hit_rate  # noqa: PLC0415
    from kvrouter.core.errors import KvrouterError  # noqa: PLC0415
    from kvrouter.core.secret import secret_variable  # noqa: PLC0415

    console = plain_console()
    try:
        options.output.check()
        token = secret_variable(os.environ, "KVROUTER_ADMIN_TOKEN")
        router, *others = (
            RouterClient(each, token=token, timeout_s=options.timeout_s)
            for each in (options.url, *options.replicas)
        )
        hits = None if options.recording is None else hit_rate_of(options.recording, options.model)
        counts = "" if options.over_s is None else f", and counting for {options.over_s:g} s"
        with working(f"asking {options.url} and its engines{counts}"):
            report = asyncio.run(diagnose(router, others, options))
    except KvrouterError as error:
        for line in error.message.splitlines():
            echo(f"kvrouter: {line}", err=True)
        raise SystemExit(CANNOT_ASK) from error

    def draw() -> None:
        console.print(drawn(report))
        if hits is not None:
            show_hit_rate(hits, console)

    options.output.show(lambda: json_text({**msgspec.to_builtins(report), "hit_rate": hits}), draw)
    if report.has_problems:
        raise SystemExit(1)

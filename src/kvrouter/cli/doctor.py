"""``kvrouter doctor``: what is wrong with a running fleet, why it matters, and what ends it."""

import os
from pathlib import Path

import click

from kvrouter.cli.ask import plain_console, url_option
from kvrouter.cli.flags import output_option
from kvrouter.commands.output import Output, echo, json_text

CANNOT_ASK = 2
"""The exit code where the router could not be asked."""


@click.command(short_help="Name what is wrong with a running fleet, and the remedy.")
@url_option
@click.option(
    "--replica",
    "replicas",
    multiple=True,
    metavar="URL",
    help="Another router of the same fleet, to be compared with it; may be given more than once.",
)
@click.option(
    "--over-s",
    type=click.FloatRange(min=0, min_open=True, max=3600),
    metavar="SECONDS",
    help="Count what happens in this time, and not all since the router began.",
)
@click.option(
    "--engines/--no-engines",
    default=True,
    help="Ask engines too: what they are, what time they have, how they tokenize.  [default: engines]",
)
@click.option(
    "--timeout-s",
    type=click.FloatRange(min=0, min_open=True, max=600),
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="How long the router, or an engine, may take for an answer.",
)
@click.option(
    "--recording",
    type=click.Path(path_type=Path),
    metavar="RECORDING",
    help="A recording of its traffic: show where cache hits were lost too, as kvrouter hit-rate does.",
)
@click.option("--model", metavar="NAME", help="Whose hits; may be left out where one is recorded.")
@output_option
def doctor(
    url: str,
    *,
    replicas: tuple[str, ...],
    over_s: float | None,
    engines: bool,
    timeout_s: float,
    recording: Path | None,
    model: str | None,
    output: Output,
) -> None:
    """Check a running fleet: ask its router, and its engines where they can be reached, and name everything
    that is wrong with what was seen of it, why it matters, and the remedy. Checks that could not be made are
    listed with the reason. Nothing is changed; engines get a short text to tokenize.

    Exit code: 0 where nothing is wrong (notes are no problems), 1 for problems, 2 where the router could not
    be asked, or RECORDING could not be read.

    Where the router has an admin token, it is read from KVROUTER_ADMIN_TOKEN.
    """
    if model is not None and recording is None:
        raise click.UsageError("--model is about RECORDING: give --recording too")
    import asyncio  # noqa: PLC0415

    import msgspec  # noqa: PLC0415

    from kvrouter.api.client import RouterClient  # noqa: PLC0415
    from kvrouter.cli.doctor_report import drawn  # noqa: PLC0415
    from kvrouter.commands.doctor.diagnosis import DoctorOptions, diagnose  # noqa: PLC0415
    from kvrouter.commands.hit_rate import hit_rate_of, show_hit_rate  # noqa: PLC0415
    from kvrouter.core.errors import KvrouterError  # noqa: PLC0415
    from kvrouter.core.secret import secret_variable  # noqa: PLC0415

    options = DoctorOptions(over_s=over_s, asks_engines=engines, timeout_s=timeout_s)
    console = plain_console()
    try:
        output.check()
        token = secret_variable(os.environ, "KVROUTER_ADMIN_TOKEN")
        router, *others = (RouterClient(each, token=token, timeout_s=timeout_s) for each in (url, *replicas))
        hits = None if recording is None else hit_rate_of(recording, model)
        report = asyncio.run(diagnose(router, others, options))
    except KvrouterError as error:
        for line in error.message.splitlines():
            echo(f"kvrouter: {line}", err=True)
        raise SystemExit(CANNOT_ASK) from error

    def draw() -> None:
        console.print(drawn(report))
        if hits is not None:
            show_hit_rate(hits, console)

    output.show(lambda: json_text({**msgspec.to_builtins(report), "hit_rate": hits}), draw)
    if report.has_problems:
        raise SystemExit(1)

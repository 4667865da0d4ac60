"""``kvrouter doctor``: what is wrong with a running fleet, why it matters, and what ends it."""

import os

import click

from kvrouter.cli.ask import plain_console
from kvrouter.cli.options import takes
from kvrouter.commands.options import DoctorOptions
from kvrouter.commands.output import echo, json_text

CANNOT_ASK = 2
"""The exit code where the router could not be asked."""


@click.command(short_help="Name what is wrong with a running fleet, and the remedy.")
@takes(DoctorOptions)
def doctor(options: DoctorOptions) -> None:
    """Check a running fleet: ask its router, and its engines where they can be reached, and name everything
    that is wrong with what was seen of it, why it matters, and the remedy. Checks that could not be made are
    listed with the reason. Nothing is changed; engines get a short text to tokenize.

    Exit code: 0 where nothing is wrong (notes are no problems), 1 for problems, 2 where the router could not
    be asked, or RECORDING could not be read.

    Where the router has an admin token, it is read from KVROUTER_ADMIN_TOKEN.
    """
    if options.model is not None and options.recording is None:
        raise click.UsageError("--model is about RECORDING: give --recording too")
    import asyncio  # noqa: PLC0415

    import msgspec  # noqa: PLC0415

    from kvrouter.api.client import RouterClient  # noqa: PLC0415
    from kvrouter.cli.doctor_report import drawn  # noqa: PLC0415
    from kvrouter.commands.doctor.diagnosis import diagnose  # noqa: PLC0415
    from kvrouter.commands.hit_rate import hit_rate_of, show_hit_rate  # noqa: PLC0415
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

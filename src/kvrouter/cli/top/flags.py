"""``kvrouter top``: its options."""

from dataclasses import dataclass

import click

from kvrouter.cli.ask import RouterOptions, plain_console, router_at
from kvrouter.cli.options import takes
from kvrouter.cli.output import TABLE, Output, json_text
from kvrouter.cli.progress import working
from kvrouter.settings.option import option


@dataclass(frozen=True, slots=True, kw_only=True)
class TopOptions(RouterOptions):
    """How the fleet is shown."""

    interval_s: float = option("How often it is asked.", default=1.0, metavar="SECONDS", at_least=0.2)
    once: bool = option("Print it once, and exit.", default=False)
    output: Output = TABLE


@click.command(short_help="Show the fleet of a running router, live.")
@takes(TopOptions)
def top(options: TopOptions) -> None:
    """Show what a running router knows: workers with load, cache and feed, KV between domains, the latest
    decisions. q or Ctrl-C ends it. The page at /ui shows more of the same.

    Where the router has an admin token, it is read from KVROUTER_ADMIN_TOKEN.
    """
    if not options.once and options.output != TABLE:
        raise click.UsageError("--output: only with --once")
    from kvrouter.cli.top.run import drawn, read_answers, show_live, shown_frame  # noqa: PLC0415

    client, console = router_at(options.url), plain_console()
    if options.once:
        with working(f"asking {options.url}"):
            answers = read_answers(client)
        frame = shown_frame(answers)
        options.output.show(lambda: json_text(answers), lambda: console.print(drawn(frame, options.url)))
    else:
        show_live(client, options.url, console, interval_s=options.interval_s)

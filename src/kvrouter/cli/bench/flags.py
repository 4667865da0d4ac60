"""The command line of ``kvrouter bench``: its options and its help."""

import os
import sys
from dataclasses import dataclass

import click

from kvrouter.cli.ask import RouterOptions, plain_console, router_at
from kvrouter.cli.options import takes
from kvrouter.cli.output import TABLE, Output
from kvrouter.core.secret import secret_variable
from kvrouter.settings.option import option
from kvrouter.settings.variables import ENGINE_KEY_VARIABLE


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions(RouterOptions):
    """The compared routers and engines, and the requests that they get."""

    model: str | None = option("The model; may be left out where one is served.", metavar="NAME")
    engine_urls: tuple[str, ...] = option(
        "An engine's server for round-robin, as http://10.0.1.1:8000. Give it once for each engine.  "
        "[default: those that the router says]",
        default=(),
        flag="--engine-url",
        metavar="URL",
    )
    peers: tuple[str, ...] = option(
        "Another router before the same engines. Give it once for each.",
        default=(),
        flag="--peer",
        metavar="NAME=URL",
    )
    seconds: float = option(
        "The time for all rounds; the number of conversations follows from it. A run that takes three times "
        "as long, and 30 s more, is stopped.",
        default=100.0,
        metavar="S",
        at_least=1.0,
        at_most=86_400,
    )
    rounds: int = option(
        "How many rounds there are at most; they end before where the time is over.",
        default=100,
        metavar="N",
        at_least=1,
        at_most=100,
    )
    concurrency: int | None = option(
        "How many requests are in flight at a time.  [default: one for each KV cache of the engines]",
        metavar="N",
        at_least=1,
        at_most=1024,
    )
    prompt_tokens: int | None = option(
        "The longest prompt, that of a last turn.  [default: up to 4096, as context and cache allow]",
        metavar="N",
        at_least=64,
    )
    yes: bool = option("Send it while requests of others run there, too.", default=False)
    output: Output = TABLE


@click.command(
    short_help="Compare a running router with round-robin on its own engines, by the same conversations."
)
@takes(BenchOptions)
def bench(options: BenchOptions) -> None:
    """Send the same conversations through a running router and by round-robin straight to its engines, in
    turn, and compare time to first token, hit rate, tokens a second and errors.

    Groups of users share a system prompt, and each user asks several times. Sizes fit the engines' context
    and caches, and the speed of a few requests that are sent first. How many requests follow is said before
    they are sent: they take room in the engines' caches from other users' prompts. Where requests of others
    run, --yes is needed. Ctrl-C ends it, with a report of the rounds that are over.

    Where engines have no URL, or prefill and decode are separate, the router itself does round-robin.

    Where the router has an admin token, it is read from KVROUTER_ADMIN_TOKEN. The key in
    KVROUTER_ENGINE_API_KEY is sent to the URLs of --engine-url and --peer, and to no other.
    """
    from kvrouter.cli.bench.run import run_bench  # noqa: PLC0415

    key = secret_variable(os.environ, ENGINE_KEY_VARIABLE)
    sys.exit(run_bench(options, router_at(options.url), plain_console(), api_key=key))

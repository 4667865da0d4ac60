"""Commands that ask a running router."""

import os
from typing import TYPE_CHECKING

import click

from kvrouter.cli.flags import output_option
from kvrouter.commands.output import TABLE, Output, json_text

if TYPE_CHECKING:
    from kvrouter.api.client import RouterClient
    from kvrouter.commands.console import TextConsole


url_option = click.option(
    "--url",
    envvar="KVROUTER_URL",
    default="http://127.0.0.1:8000",
    help="The running router.  [KVROUTER_URL; default: http://127.0.0.1:8000]",
)
"""The flag of every command that asks a running router."""


@click.command(short_help="Show where a prompt would go, or a request went, and why.")
@click.argument("prompt", required=False)
@click.option("--request-id", metavar="ID", help="Show where this request went, instead of a prompt.")
@url_option
@click.option("--model", help="The model; may be left out where one is served.")
@click.option("--completion", is_flag=True, help="Take PROMPT as a completion's, without the chat template.")
@output_option
def explain(
    prompt: str | None,
    *,
    request_id: str | None,
    url: str,
    model: str | None,
    completion: bool,
    output: Output,
) -> None:
    """Show where PROMPT, sent as a chat, would go, and why: every worker, its cost, and why others may not
    take it. With --request-id: where one of the last requests went, attempt by attempt.

    A refusal is an answer too, with its error first, and exit code 0; 1 says that the router could not be
    asked.

    Where the router has an admin token, it is read from KVROUTER_ADMIN_TOKEN.
    """
    if (prompt is None) == (request_id is None):
        raise click.UsageError("give PROMPT, or --request-id ID, and not both")
    client = router_at(url)
    if prompt is not None:
        answer = client.explain(prompt, model or client.only_model(), is_completion=completion)
        _show_explanation(answer, output)
    elif request_id is not None:
        if model is not None or completion:
            raise click.UsageError("--model and --completion are about PROMPT, not about --request-id")
        _show_decisions(client.decisions(request_id), output)


def _show_explanation(answer: bytes, output: Output) -> None:
    from kvrouter.api.client import decode_answer  # noqa: PLC0415
    from kvrouter.api.decisions import Explanation  # noqa: PLC0415
    from kvrouter.cli.explain import draw  # noqa: PLC0415

    explanation = decode_answer(answer, Explanation)
    output.show(lambda: answer, lambda: draw(explanation, plain_console()))


def _show_decisions(answer: bytes, output: Output) -> None:
    from kvrouter.api.client import decode_answer  # noqa: PLC0415
    from kvrouter.api.decisions import Decisions  # noqa: PLC0415
    from kvrouter.cli.explain import draw_decisions  # noqa: PLC0415

    decisions = decode_answer(answer, Decisions)
    output.show(lambda: answer, lambda: draw_decisions(decisions, plain_console()))


@click.command(short_help="Show the fleet of a running router, live.")
@url_option
@click.option(
    "--interval-s",
    type=click.FloatRange(min=0.2),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="How often it is asked.",
)
@click.option("--once", is_flag=True, help="Print it once, and exit.")
@output_option
def top(url: str, *, interval_s: float, once: bool, output: Output) -> None:
    """Show what a running router knows: workers with load, cache and feed, KV between domains, the latest
    decisions. Ctrl-C ends it. The page at /ui shows more of the same.

    Where the router has an admin token, it is read from KVROUTER_ADMIN_TOKEN.
    """
    if not once and output != TABLE:
        raise click.UsageError("--output: only with --once")
    from kvrouter.cli.top import drawn, read_answers, show_live, shown_frame  # noqa: PLC0415

    client, console = router_at(url), plain_console()
    if once:
        answers = read_answers(client)
        frame = shown_frame(answers)
        output.show(lambda: json_text(answers), lambda: console.print(drawn(frame, url)))
    else:
        show_live(client, url, console, interval_s=interval_s)


def plain_console(*, line_chars: int = 140) -> "TextConsole":
    """The terminal; what is no terminal gets wide lines without colour."""
    from kvrouter.commands.console import TextConsole  # noqa: PLC0415

    console = TextConsole()
    return console if console.is_terminal else TextConsole(width=line_chars, no_color=True)


def router_at(url: str) -> "RouterClient":
    """Return a client of the router there, with the token of the environment. Raises AskFailed."""
    from kvrouter.api.client import RouterClient  # noqa: PLC0415
    from kvrouter.core.secret import secret_variable  # noqa: PLC0415

    return RouterClient(url, token=secret_variable(os.environ, "KVROUTER_ADMIN_TOKEN"))

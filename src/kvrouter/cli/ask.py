"""Commands that ask a running router."""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from kvrouter.cli.options import takes
from kvrouter.commands.options import RouterOptions
from kvrouter.commands.output import TABLE, Output, json_text
from kvrouter.config.option import option

if TYPE_CHECKING:
    from kvrouter.api.client import RouterClient
    from kvrouter.commands.console import TextConsole


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """Which request is explained."""

    request_id: str | None = option("Show where this request went, instead of a prompt.", metavar="ID")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """What PROMPT is."""

    model: str | None = option("The model; may be left out where one is served.")
    completion: bool = option("Take PROMPT as a completion's, without the chat template.", default=False)
    output: Output = TABLE


@dataclass(frozen=True, slots=True, kw_only=True)
class TopOptions(RouterOptions):
    """How the fleet is shown."""

    interval_s: float = option("How often it is asked.", default=1.0, metavar="SECONDS", at_least=0.2)
    once: bool = option("Print it once, and exit.", default=False)
    output: Output = TABLE


@click.command(short_help="Show where a prompt would go, or a request went, and why.")
@click.argument("prompt", required=False)
@takes(RequestOptions, RouterOptions, PromptOptions)
def explain(request: RequestOptions, router: RouterOptions, about: PromptOptions, prompt: str | None) -> None:
    """Show where PROMPT, sent as a chat, would go, and why: every worker, its cost, and why others may not
    take it. With --request-id: where one of the last requests went, attempt by attempt.

    A refusal is an answer too, with its error first, and exit code 0; 1 says that the router could not be
    asked.

    Where the router has an admin token, it is read from KVROUTER_ADMIN_TOKEN.
    """
    if (prompt is None) == (request.request_id is None):
        raise click.UsageError("give PROMPT, or --request-id ID, and not both")
    client = router_at(router.url)
    if prompt is not None:
        model = about.model or client.only_model()
        answer = client.explain(prompt, model, is_completion=about.completion)
        _show_explanation(answer, about.output)
    elif request.request_id is not None:
        if about.model is not None or about.completion:
            raise click.UsageError("--model and --completion are about PROMPT, not about --request-id")
        _show_decisions(client.decisions(request.request_id), about.output)


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
@takes(TopOptions)
def top(options: TopOptions) -> None:
    """Show what a running router knows: workers with load, cache and feed, KV between domains, the latest
    decisions. Ctrl-C ends it. The page at /ui shows more of the same.

    Where the router has an admin token, it is read from KVROUTER_ADMIN_TOKEN.
    """
    if not options.once and options.output != TABLE:
        raise click.UsageError("--output: only with --once")
    from kvrouter.cli.top import drawn, read_answers, show_live, shown_frame  # noqa: PLC0415

    client, console = router_at(options.url), plain_console()
    if options.once:
        answers = read_answers(client)
        frame = shown_frame(answers)
        options.output.show(lambda: json_text(answers), lambda: console.print(drawn(frame, options.url)))
    else:
        show_live(client, options.url, console, interval_s=options.interval_s)


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

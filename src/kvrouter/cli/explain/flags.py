"""``kvrouter explain``: its options, and how its answers are shown."""

from dataclasses import dataclass

import click

from kvrouter.cli.ask import RouterOptions, plain_console, router_at
from kvrouter.cli.options import takes
from kvrouter.cli.output import TABLE, Output
from kvrouter.cli.progress import working
from kvrouter.settings.option import option


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """Which request is explained."""

    request_id: str | None = option("Show where this request went, instead of a prompt.", metavar="ID")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """The form of PROMPT."""

    model: str | None = option("The model; may be left out where one is served.")
    completion: bool = option("Take PROMPT as a completion's, without the chat template.", default=False)
    output: Output = TABLE


@click.command(short_help="Show where a prompt would go, or a request went, and why.")
@click.argument("prompt", required=False)
@takes(RequestOptions, RouterOptions, PromptOptions)
def explain(
    request: RequestOptions, router: RouterOptions, prompt_options: PromptOptions, prompt: str | None
) -> None:
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
        with working(f"asking {router.url}"):
            model = prompt_options.model or client.only_model()
            answer = client.explain(prompt, model, is_completion=prompt_options.completion)
        _show_explanation(answer, prompt_options.output)
    elif request.request_id is not None:
        if prompt_options.model is not None or prompt_options.completion:
            raise click.UsageError("--model and --completion are about PROMPT, not about --request-id")
        with working(f"asking {router.url}"):
            answer = client.decisions(request.request_id)
        _show_decisions(answer, prompt_options.output)


def _show_explanation(answer: bytes, output: Output) -> None:
    from kvrouter.api.client import decode_answer  # noqa: PLC0415
    from kvrouter.api.decision_schema import Explanation  # noqa: PLC0415
    from kvrouter.cli.explain.report import draw  # noqa: PLC0415

    explanation = decode_answer(answer, Explanation)
    output.show(lambda: answer, lambda: draw(explanation, plain_console()))


def _show_decisions(answer: bytes, output: Output) -> None:
    from kvrouter.api.client import decode_answer  # noqa: PLC0415
    from kvrouter.api.decision_schema import Decisions  # noqa: PLC0415
    from kvrouter.cli.explain.report import draw_decisions  # noqa: PLC0415

    decisions = decode_answer(answer, Decisions)
    output.show(lambda: answer, lambda: draw_decisions(decisions, plain_console()))

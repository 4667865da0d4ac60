"""Fields that a body may not use: what the engines here cannot honour, and what was put in the wrong place.

Each of them changes the answer or where it is computed. Left alone in silence, a client would take text
without its grammar, or a worker outside its constraint, for what it asked for.
"""

from collections.abc import Mapping, Sequence

from kvrouter.core.errors import InvalidRequest
from kvrouter.frontend.openai.schema import ChatBody, CompletionBody, GenerateBody, MisplacedFields

_HARMLESS: Mapping[str, Sequence[object]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "logit_bias": ({},),
    "modalities": ([], ["text"]),
    "prompt_logprobs": (),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
}
"""The values, beside null, with which a field asks for nothing; ``auto`` without tools chooses none."""

_HARMLESS_IN_CHAT: Mapping[str, Sequence[object]] = {"logprobs": (False,), "top_logprobs": (0,)}
_HARMLESS_IN_COMPLETION: Mapping[str, Sequence[object]] = {"logprobs": ()}
"""A number: at 0 it asks for the log probability of each chosen token."""


def refuse_fields(body: GenerateBody) -> None:
    """Raise :class:`InvalidRequest` naming the first field that cannot be honoured where it is."""
    refuse_misplaced(body)
    _refuse(body, _HARMLESS)
    if isinstance(body, ChatBody):
        _refuse(body, _HARMLESS_IN_CHAT)
    elif isinstance(body, CompletionBody):
        _refuse(body, _HARMLESS_IN_COMPLETION)


def refuse_misplaced(body: MisplacedFields) -> None:
    """Raise :class:`InvalidRequest` naming the first field that belongs into ``nvext``."""
    for field in MisplacedFields.__struct_fields__:
        if getattr(body, field) is not None:
            raise InvalidRequest(
                f"{field}: belongs into nvext, as nvext.{field}; beside it nothing reads it", param=field
            )


def _refuse(body: GenerateBody, harmless: Mapping[str, Sequence[object]]) -> None:
    for field, values in harmless.items():
        value = getattr(body, field)
        if value is None or value in values:
            continue
        if field == "best_of":
            raise InvalidRequest(f"{field}: one answer a request, not {value}", param=field)
        raise InvalidRequest(
            f"{field}: needs an engine that takes text; the workers of this model take tokens", param=field
        )

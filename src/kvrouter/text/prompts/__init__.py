"""Makes prompts as each kind of engine does: roles, tools and contents in the form that its template gets.
Engines cache tokens, so any difference makes routing predict the wrong cached blocks.
"""

from collections.abc import Callable, Mapping

from kvrouter.text.prompts import sglang, vllm
from kvrouter.text.prompts.fields import Prompt, PromptFields, TemplateTraits

MakePrompt = Callable[[PromptFields, TemplateTraits], Prompt]
"""Makes the prompt of a call. Raises InvalidRequest for a call that engines refuse or that is unknown."""


def _as_text(fields: PromptFields, _: TemplateTraits) -> Prompt:
    """Make a prompt as vLLM does, but with contents as text and unchanged roles. TensorRT-LLM does so, whose
    request model is an older vLLM's.
    """
    return vllm.make_prompt(fields, TemplateTraits(names_developer=True))


PROMPT_MAKERS: Mapping[str, MakePrompt] = {
    "vllm": vllm.make_prompt,
    "sglang": sglang.make_prompt,
    "trtllm": _as_text,
}
"""The prompt function of every kind of engine in the registry."""


def prompt_maker(engine_kind: str) -> MakePrompt:
    """Return the prompt function of an engine kind; a kind without one, as the mock's, has TensorRT-LLM's."""
    return PROMPT_MAKERS.get(engine_kind, _as_text)

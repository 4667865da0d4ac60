"""What each kind of engine makes of a call before its template: roles, tools and contents as its own request
model has them. Engines cache tokens, so every difference here is a prompt that routing takes for another one.
"""

from collections.abc import Callable, Mapping

from kvrouter.text.prompts import sglang, vllm
from kvrouter.text.prompts.fields import Prompt, PromptFields, TemplateTraits

MakePrompt = Callable[[PromptFields, TemplateTraits], Prompt]
"""Makes the prompt of a call. Raises InvalidRequest for what no engine of the kind takes, or nobody knows."""


def _as_text(fields: PromptFields, _: TemplateTraits) -> Prompt:
    """As vLLM does, but that contents are always text and roles stay as they are: so does TensorRT-LLM, which
    took vLLM's reading over before the rest was in it.
    """
    return vllm.make_prompt(fields, TemplateTraits(names_developer=True))


_BY_ENGINE: Mapping[str, MakePrompt] = {"vllm": vllm.make_prompt, "sglang": sglang.make_prompt}


def prompt_maker(engine_kind: str) -> MakePrompt:
    """Return what makes prompts as engines of this kind do, such as ``vllm``."""
    return _BY_ENGINE.get(engine_kind, _as_text)

"""The tokens of a call that its engine tokenizes itself: for routing, which wants to know the same ones."""

from array import array
from collections.abc import Mapping, Sequence

from kvrouter.core.errors import InvalidRequest
from kvrouter.core.requests import TokenBuffer
from kvrouter.frontend.openai.passed import PassedBody, PassedCall
from kvrouter.text.messages import before_media
from kvrouter.text.model import TextModel

TOKEN_LIMIT = 2**32


async def passed_tokens(passed: PassedCall, text: TextModel) -> tuple[TokenBuffer, bool]:
    """Return the prompt's tokens, and whether they are all of them and for certain."""
    body = passed.body
    if not isinstance(body.messages, list):
        return await _prompt_tokens(body, text)
    messages: Sequence[Mapping[str, object]] = body.messages
    known = before_media(messages)
    is_exact = (
        known is messages
        and body.chat_template is None
        and body.documents is None
        and not body.continue_final_message
        and not body.add_special_tokens
    )
    try:
        token_ids = await text.encode_chat(
            known,
            tools=body.tools,
            add_generation_prompt=body.add_generation_prompt is not False and known is messages,
            template_kwargs=body.chat_template_kwargs,
        )
    except InvalidRequest:
        # Whether these messages are wrong is the engine's to say: it may have another template.
        return await text.encode_prompt(_texts(known)), False
    return token_ids, is_exact


async def _prompt_tokens(body: PassedBody, text: TextModel) -> tuple[TokenBuffer, bool]:
    """Of several prompts the first one is where the request goes."""
    prompt = body.prompt
    is_exact = body.add_special_tokens is not False
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        is_exact = is_exact and len(prompt) == 1
        prompt = prompt[0]
    if isinstance(prompt, str):
        return await text.encode_prompt(prompt), is_exact
    if isinstance(prompt, list):
        if all(isinstance(token, int) and 0 <= token < TOKEN_LIMIT for token in prompt):
            return array("I", prompt), is_exact
        raise InvalidRequest("prompt: token ids are integers from 0 to 2**32-1", param="prompt")
    return array("I"), False


def _texts(messages: Sequence[Mapping[str, object]]) -> str:
    return "\n".join(str(message.get("content") or "") for message in messages)

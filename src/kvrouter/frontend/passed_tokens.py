"""The tokens of a call that its engine tokenizes itself: for routing, which wants to know the same ones."""

import asyncio
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from kvrouter.core.errors import InvalidRequest
from kvrouter.core.requests import TokenBuffer
from kvrouter.frontend.openai.passed import PassedCall
from kvrouter.text.messages import media_named
from kvrouter.text.model import TextModel

LONG_BODY_BYTES = 256 * 1024
"""Pictures in a longer call are named in a thread: it takes a while to read them."""


class PassedTokens(NamedTuple):
    """A prompt's tokens; ``is_exact``: they are all of them and for certain. With ``has_media`` some stand
    for what is no text, and nobody here knows what an engine makes of it.
    """

    token_ids: TokenBuffer
    is_exact: bool
    has_media: bool = False


async def passed_tokens(passed: PassedCall, text: TextModel) -> PassedTokens:
    """Return what routing may know of the prompt."""
    body = passed.body
    if not isinstance(body.messages, list):
        return await _prompt_tokens(passed, text)
    messages: Sequence[Mapping[str, object]] = body.messages
    if len(passed.client_call.body) > LONG_BODY_BYTES:
        known = await asyncio.to_thread(media_named, messages)
    else:
        known = media_named(messages)
    has_media = known is not messages
    is_exact = (
        not has_media
        and body.chat_template is None
        and body.documents is None
        and not body.continue_final_message
        and not body.add_special_tokens
    )
    try:
        token_ids = await text.encode_chat(
            known,
            tools=body.tools,
            add_generation_prompt=body.add_generation_prompt is not False,
            template_kwargs=body.chat_template_kwargs,
        )
    except InvalidRequest:
        # Whether these messages are wrong, or too long, is the engine's to say: it may have another template.
        beginning = _beginning(known, text.prompt_max_chars)
        return PassedTokens(await text.encode_beginning(beginning), is_exact=False, has_media=has_media)
    return PassedTokens(token_ids, is_exact, has_media)


async def _prompt_tokens(passed: PassedCall, text: TextModel) -> PassedTokens:
    if passed.prompt is None:
        return PassedTokens(array("I"), is_exact=False)
    content, is_only = passed.prompt
    is_exact = is_only and passed.body.add_special_tokens is not False
    if not isinstance(content, str):
        return PassedTokens(content, is_exact)
    try:
        return PassedTokens(await text.encode_prompt(content), is_exact)
    except InvalidRequest:
        # Too long is what its engine calls too long: it may cut prompts.
        return PassedTokens(await text.encode_beginning(content), is_exact=False)


def _beginning(messages: Sequence[Mapping[str, object]], chars_max: int) -> str:
    """The first characters of the texts in messages. No more of them is looked at: they may be megabytes."""
    found: list[str] = []
    for text in _texts(messages):
        found.append(text[:chars_max])
        chars_max -= len(text) + 1
        if chars_max <= 0:
            break
    return "\n".join(found)


def _texts(messages: Sequence[Mapping[str, object]]) -> Iterator[str]:
    for message in messages:
        content = message.get("content")
        if isinstance(content, str):
            yield content
        elif isinstance(content, list):
            for part in content:
                text = part.get("text") if isinstance(part, dict) else None
                if isinstance(text, str):
                    yield text

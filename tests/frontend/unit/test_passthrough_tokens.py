"""What routing knows of prompts that their engine tokenizes itself."""

import json
import tracemalloc
from dataclasses import replace

import pytest

from kvrouter.core.requests import CallRoute
from kvrouter.frontend.openai.passthrough import READ_BYTES_MAX
from kvrouter.frontend.response_passthrough import PassthroughTokens, passthrough_tokens
from kvrouter.text.model import TextModel
from tests.testing.body_parsers import parse_passthrough
from tests.testing.frontend_harness import mock_text

UNTEMPLATED = replace(mock_text(), template=None)


async def known(messages: list[object], text: TextModel = UNTEMPLATED) -> PassthroughTokens:
    body = json.dumps({"model": "m", "messages": messages}).encode()
    return await passthrough_tokens(parse_passthrough(CallRoute.CHAT, body), text, "vllm")


def says(*texts: str) -> dict[str, object]:
    return {"role": "user", "content": [{"type": "text", "text": text} for text in texts]}


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([{"role": "user", "content": "hello"}, says("you", "there")], "hello\nyou\nthere"),
        ([{"content": None}, {"content": 7}, {"content": [{"type": "text", "text": 7}]}, says("hi")], "hi"),
    ],
)
async def test_a_chat_without_a_fitting_template_uses_its_texts(messages: list[object], text: str) -> None:
    found = await known(messages)
    assert list(found.token_ids) == list(UNTEMPLATED.tokenizer.encode_prompt(text))
    assert not found.is_exact


@pytest.mark.asyncio
async def test_a_chat_is_read_up_to_the_context_length() -> None:
    short = replace(UNTEMPLATED, context_length_tokens=16)
    word = "hello "
    body = json.dumps({"model": "m", "messages": [says(*[word * 80_000] * 16)]}).encode()
    passed = parse_passthrough(CallRoute.CHAT, body)
    beginning = (word * 80_000)[: short.prompt_max_chars]
    expected = await short.encode_beginning(beginning)
    tracemalloc.start()
    try:
        found = await passthrough_tokens(passed, short, "vllm")
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert list(found.token_ids) == list(expected)
    assert peak_bytes < 1_000_000


@pytest.mark.asyncio
async def test_a_too_long_chat_passes_without_being_decoded() -> None:
    at_most = json.dumps([says("x" * READ_BYTES_MAX)]).encode()
    at_most = at_most.replace(b"x" * (len(at_most) - READ_BYTES_MAX), b"", 1)
    for messages, is_read in ((at_most, True), (at_most + b" ", True), (at_most[:-1] + b" ]", False)):
        body = b'{"model":"m","messages":%b}' % messages
        tracemalloc.start()
        try:
            passed = parse_passthrough(CallRoute.CHAT, body)
            found = await passthrough_tokens(passed, UNTEMPLATED, "vllm")
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert passed.client_call.body is body
        assert bool(found.token_ids) is is_read
        assert not found.is_exact
        assert is_read or peak_bytes < 100_000

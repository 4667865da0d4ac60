"""Calls of Python's clients, each as its users write it; run by the clients' own Python.

    python calls.py URL MODEL

Prints a line of JSON for each: the client, what it does, and why it failed (null where it did not).
"""

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any

import anthropic
import litellm
import openai
from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI

URL, MODEL = sys.argv[1:]
V1 = f"{URL}/v1"
CHAT: Any = [{"role": "user", "content": "Where is my cache?"}]
KEY = "none"

sync = openai.OpenAI(base_url=V1, api_key=KEY, max_retries=0)
claude = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0)


def whole_chat() -> object:
    return sync.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=8).choices[0].message.content


def streamed_chat() -> object:
    events = sync.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=8, stream=True)
    return "".join(event.choices[0].delta.content or "" for event in events if event.choices)


def async_chat() -> object:
    async def ask() -> object:
        async with openai.AsyncOpenAI(base_url=V1, api_key=KEY, max_retries=0) as client:
            events = await client.chat.completions.create(
                model=MODEL, messages=CHAT, max_tokens=8, stream=True
            )
            return "".join([e.choices[0].delta.content or "" async for e in events if e.choices])

    return asyncio.run(ask())


def completion() -> object:
    return sync.completions.create(model=MODEL, prompt="Where is", max_tokens=8).choices[0].text


def models() -> object:
    return [model.id for model in sync.models.list()]


def whole_response() -> object:
    return sync.responses.create(model=MODEL, input="Where is my cache?", max_output_tokens=16).output_text


def streamed_response() -> object:
    with sync.responses.stream(model=MODEL, input="Where is my cache?", max_output_tokens=16) as stream:
        for _ in stream:
            pass
        return stream.get_final_response().output_text


def whole_message() -> object:
    return claude.messages.create(model=MODEL, messages=CHAT, max_tokens=8).content[0].text


def streamed_message() -> object:
    with claude.messages.stream(model=MODEL, messages=CHAT, max_tokens=8) as stream:
        return "".join(stream.text_stream)


def message_tokens() -> object:
    return claude.messages.count_tokens(model=MODEL, messages=CHAT).input_tokens


def litellm_chat() -> object:
    answer = litellm.completion(
        model=f"openai/{MODEL}", messages=CHAT, max_tokens=8, api_base=V1, api_key=KEY
    )
    return answer.choices[0].message.content


def litellm_streamed() -> object:
    events = litellm.completion(
        model=f"openai/{MODEL}", messages=CHAT, max_tokens=8, api_base=V1, api_key=KEY, stream=True
    )
    return "".join(event.choices[0].delta.content or "" for event in events)


def litellm_response() -> object:
    answer = litellm.responses(
        model=f"openai/{MODEL}", input="Where is my cache?", max_output_tokens=16, api_base=V1, api_key=KEY
    )
    return answer.output[0].content[0].text


def langchain_chat() -> object:
    return (
        ChatOpenAI(model=MODEL, base_url=V1, api_key=KEY, max_tokens=8).invoke("Where is my cache?").content
    )


def langchain_streamed() -> object:
    client = ChatOpenAI(model=MODEL, base_url=V1, api_key=KEY, max_tokens=8)
    return "".join(str(piece.content) for piece in client.stream("Where is my cache?"))


def langchain_claude() -> object:
    client = ChatAnthropic(model=MODEL, base_url=URL, api_key=KEY, max_tokens=8)
    return client.invoke("Where is my cache?").content


CALLS: list[tuple[str, str, Callable[[], object]]] = [
    ("openai (Python)", "chat", whole_chat),
    ("openai (Python)", "chat, streamed", streamed_chat),
    ("openai (Python)", "chat, async and streamed", async_chat),
    ("openai (Python)", "completion", completion),
    ("openai (Python)", "models", models),
    ("openai (Python)", "responses", whole_response),
    ("openai (Python)", "responses, streamed", streamed_response),
    ("anthropic (Python)", "messages", whole_message),
    ("anthropic (Python)", "messages, streamed", streamed_message),
    ("anthropic (Python)", "count_tokens", message_tokens),
    ("LiteLLM", "completion", litellm_chat),
    ("LiteLLM", "completion, streamed", litellm_streamed),
    ("LiteLLM", "responses", litellm_response),
    ("LangChain", "ChatOpenAI", langchain_chat),
    ("LangChain", "ChatOpenAI, streamed", langchain_streamed),
    ("LangChain", "ChatAnthropic", langchain_claude),
]

for client, what, call in CALLS:
    try:
        failed = None if call() else "an empty answer"
    except Exception as error:  # noqa: BLE001 - each client has errors of its own, and the table has them all
        failed = f"{type(error).__name__}: {error}"
    print(json.dumps({"client": client, "what": what, "failed": failed}), flush=True)

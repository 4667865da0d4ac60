"""Calls of routes that pass as they are: what of them routing can know, and what no client may say."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from msgspec import Raw

from kvrouter.core.errors import InvalidRequest
from kvrouter.core.ids import ModelName
from kvrouter.core.lax import lax_bool, lax_int
from kvrouter.core.requests import CallRoute, ClientCall, ClientForm
from kvrouter.frontend.openai.body import NvExt, ScannedBody
from kvrouter.frontend.openai.form import Form
from kvrouter.frontend.openai.parse import READER, NvextReader
from kvrouter.frontend.openai.passthrough import (
    ROUTERS_FIELDS,
    LaxFields,
    Message,
    PassthroughBody,
    PassthroughCall,
    passed_call_of,
    written_call,
)


class Chat(NamedTuple):
    """A prompt as OpenAI's chats have it: what an engine makes of a call before it renders its template."""

    messages: list[Message]
    tools: list[object]


class PassedRoute(NamedTuple):
    """How calls of one route are passed. ``chat_of`` returns the prompt, where one can be known: then the
    worker is picked that has most of it cached, else by load. Without ``takes_salt`` engines read no salt
    there, so that a tenant's KV would not be kept apart. Where it ``is_anthropic`` errors have their form.
    Calls of a route that ``is_form`` are forms with a file, and none of JSON.
    """

    route: CallRoute
    what: str
    chat_of: Callable[[LaxFields], Chat | None] | None = None
    streams: bool = False
    takes_salt: bool = True
    is_anthropic: bool = False
    is_form: bool = False


def _of_responses(fields: LaxFields) -> Chat | None:
    """The prompt of OpenAI's Responses; None where it goes on from what one engine keeps."""
    if fields.value("previous_response_id") is not None or fields.value("prompt") is not None:
        return None
    messages: list[Message] = []
    instructions, given = fields.value("instructions"), fields.value("input")
    if isinstance(instructions, str):
        messages.append({"role": "system", "content": instructions})
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    messages.extend(_messages(items))
    return Chat(messages, [*_functions(fields.value("tools"), "parameters")]) if messages else None


def _of_messages(fields: LaxFields) -> Chat | None:
    """The prompt of Anthropic's Messages."""
    messages: list[Message] = []
    system = _plain(fields.value("system"))
    if system:
        messages.append({"role": "system", "content": system})
    messages.extend(_messages(fields.value("messages")))
    return Chat(messages, [*_functions(fields.value("tools"), "input_schema")]) if messages else None


def _messages(items: object) -> Iterator[Message]:
    """Yield the messages up to the first item that is none: what follows is not known here."""
    for item in items if isinstance(items, list) else ():
        if not isinstance(item, dict) or item.get("type", "message") != "message" or "role" not in item:
            return
        content = item.get("content")
        plain = _plain(content)
        yield {"role": item["role"], "content": content if plain is None else plain}


def _plain(content: object) -> str | None:
    """The text of a content, where it has nothing else."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    found = [text for text in texts if isinstance(text, str)]
    return "".join(found) if found and len(found) == len(parts) else None


def _functions(tools: object, parameters: str) -> Iterator[object]:
    """Yield tools as chats have them, where they are functions."""
    for tool in tools if isinstance(tools, list) else ():
        if isinstance(tool, dict) and "name" in tool:
            function = {name: tool[name] for name in ("name", "description") if name in tool}
            yield {"type": "function", "function": {**function, "parameters": tool.get(parameters)}}


PASSED_ROUTES: Sequence[PassedRoute] = (
    PassedRoute(CallRoute.RESPONSES, "OpenAI's Responses", _of_responses, streams=True),
    PassedRoute(
        CallRoute.MESSAGES,
        "Anthropic's Messages",
        _of_messages,
        streams=True,
        takes_salt=False,
        is_anthropic=True,
    ),
    PassedRoute(CallRoute.COUNT_TOKENS, "Anthropic's count of tokens", is_anthropic=True),
    PassedRoute(CallRoute.EMBEDDINGS, "OpenAI's embeddings"),
    PassedRoute(CallRoute.POOLING, "vectors of a pooling model"),
    PassedRoute(CallRoute.CLASSIFY, "classes of texts"),
    PassedRoute(CallRoute.CLASSIFY_V1, "the same"),
    PassedRoute(CallRoute.SCORE, "scores of pairs of texts"),
    PassedRoute(CallRoute.SCORE_V1, "the same"),
    PassedRoute(CallRoute.RERANK, "Jina's and Cohere's reranking"),
    PassedRoute(CallRoute.RERANK_V1, "the same"),
    PassedRoute(CallRoute.RERANK_V2, "the same"),
    PassedRoute(CallRoute.MODERATIONS, "OpenAI's moderations"),
    PassedRoute(CallRoute.TOKENIZE, "tokens of a text"),
    PassedRoute(CallRoute.TOKENIZE_V1, "the same"),
    PassedRoute(CallRoute.DETOKENIZE, "the text of tokens"),
    PassedRoute(CallRoute.DETOKENIZE_V1, "the same"),
    PassedRoute(
        CallRoute.TRANSCRIPTIONS,
        "OpenAI's transcriptions of audio",
        streams=True,
        takes_salt=False,
        is_form=True,
    ),
    PassedRoute(
        CallRoute.TRANSLATIONS, "OpenAI's translations of audio", streams=True, takes_salt=False, is_form=True
    ),
    PassedRoute(CallRoute.CHATS, "vLLM's several chats in one call", takes_salt=False),
    PassedRoute(CallRoute.GENERATIVE_SCORING, "vLLM's scores by a model that generates", takes_salt=False),
    PassedRoute(CallRoute.EMBED_V2, "Cohere's embeddings", takes_salt=False),
    PassedRoute(CallRoute.GENERATE, "SGLang's own generation", streams=True, takes_salt=False),
    PassedRoute(CallRoute.ENCODE, "SGLang's own embeddings", takes_salt=False),
    PassedRoute(CallRoute.PARSE_FUNCTION_CALL, "SGLang's calls of functions in a text", takes_salt=False),
    PassedRoute(CallRoute.SEPARATE_REASONING, "SGLang's reasoning in a text", takes_salt=False),
)
"""Every route that passes, and the only place where one is named."""


def parse_passed(
    route: PassedRoute, model: ModelName, scanned: ScannedBody, reader: NvextReader = READER
) -> PassthroughCall:
    """Return the call for ``model`` in a body; raise :class:`InvalidRequest` naming the field."""
    fields = LaxFields(scanned)
    salt = fields.salt()
    nvext = reader.read(fields.raw("nvext"), salt)
    _check_hints(route, nvext)
    chat = None
    if route.chat_of is not None and not fields.has_unknown_salt(nvext):
        chat = route.chat_of(fields)
    stream = route.streams and lax_bool(fields.value("stream")) is True
    wanted = fields.value("max_tokens")
    wanted = lax_int(fields.value("max_output_tokens") if wanted is None else wanted)
    max_tokens = wanted if isinstance(wanted, int) and wanted > 0 else None
    return PassthroughCall(
        passed_call_of(model, nvext, stream=stream, max_tokens=max_tokens if route.streams else 1),
        PassthroughBody()
        if chat is None
        else PassthroughBody(messages=chat.messages, tools=chat.tools or None),
        None,
        ClientCall(
            route.route,
            written_call(scanned, salt=salt, nvext=nvext).data,
            stream=stream,
            resumable=False,
        ),
    )


def parse_form(
    route: PassedRoute, model: ModelName, form: Form, reader: NvextReader = READER
) -> PassthroughCall:
    """The same of a form, whose routing hints are headers. Raises :class:`InvalidRequest`."""
    for name in form.fields:
        if name in ROUTERS_FIELDS or name in _NOT_IN_FORMS:
            raise InvalidRequest(
                f"{name}: may not be in a form, which goes to its engine as it is: routing hints are headers",
                param=name,
            )
    nvext = reader.read(Raw(b"null"), None)
    _check_hints(route, nvext)
    stream = lax_bool(form.text("stream", "false")) is True
    return PassthroughCall(
        passed_call_of(model, nvext, stream=stream, max_tokens=None),
        PassthroughBody(),
        None,
        ClientCall(
            route.route,
            form.data,
            stream=stream,
            resumable=False,
            form=ClientForm(form.content_type, form.spans.get("model")),
        ),
    )


_NOT_IN_FORMS = frozenset({"nvext", "cache_salt", "vllm_xargs"})
"""What is read, or changed, of bodies in JSON."""


def _check_hints(route: PassedRoute, nvext: NvExt) -> None:
    for name in ("token_data", "annotations", "prefill_worker_id"):
        if getattr(nvext, name):
            raise InvalidRequest(f"nvext.{name}: {route.route} does not take it", param=f"nvext.{name}")
    if nvext.cache_salt and not route.takes_salt:
        raise InvalidRequest(
            f"cache_salt: engines read none on {route.route}, and would share what it keeps apart",
            param="cache_salt",
        )

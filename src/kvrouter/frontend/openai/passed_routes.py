"""Passed-through routes: their table, and the parsing of their calls for routing."""

from collections.abc import Sequence
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
    PassthroughCall,
    chat_of,
    passed_call_of,
    written_call,
)
from kvrouter.text.prompts.fields import PromptFields


class PassedRoute(NamedTuple):
    """How calls of one route pass through. If it ``is_chat``, its prompt is known and routed by cache, else
    calls are routed by load. Without ``takes_salt`` engines ignore a cache salt there, so that a call with
    one is refused. If it ``is_anthropic``, errors have Anthropic's form. If it ``is_form``, bodies are forms
    with a file instead of JSON.
    """

    route: CallRoute
    description: str
    is_chat: bool = False
    streams: bool = False
    takes_salt: bool = True
    is_anthropic: bool = False
    is_form: bool = False

    @property
    def read_fields(self) -> frozenset[str] | None:
        """The fields of its calls that the router reads; None, for all, when it reads the prompt."""
        return None if self.is_chat else _READ_FIELDS


_READ_FIELDS = frozenset(
    {"model", "stream", "max_tokens", "max_output_tokens", "cache_salt", "nvext", "vllm_xargs"}
)

PASSED_ROUTES: Sequence[PassedRoute] = (
    PassedRoute(CallRoute.RESPONSES, "OpenAI's Responses", is_chat=True, streams=True),
    PassedRoute(
        CallRoute.MESSAGES,
        "Anthropic's Messages",
        is_chat=True,
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
"""The table of all passed-through routes."""


def parse_passed(
    route: PassedRoute, model: ModelName, scanned: ScannedBody, reader: NvextReader = READER
) -> PassthroughCall:
    """Parse the body of a call of ``model``; raise :class:`InvalidRequest` naming the field."""
    fields = LaxFields(scanned)
    salt = fields.salt()
    nvext = reader.read(fields.raw("nvext"), salt)
    _check_hints(route, nvext)
    stream = route.streams and lax_bool(fields.value("stream")) is True
    wanted = fields.value("max_tokens")
    wanted = lax_int(fields.value("max_output_tokens") if wanted is None else wanted)
    max_tokens = wanted if isinstance(wanted, int) and wanted > 0 else None
    return PassthroughCall(
        passed_call_of(model, nvext, stream=stream, max_tokens=max_tokens if route.streams else 1),
        None,
        ClientCall(
            route.route,
            written_call(scanned, salt=salt, nvext=nvext).data,
            stream=stream,
            resumable=False,
        ),
        _chat_of(route, fields, nvext),
        unread_tokens=fields.unread_tokens(),
    )


def _chat_of(route: PassedRoute, fields: LaxFields, nvext: NvExt) -> PromptFields | None:
    """Return the fields of the prompt; None if it continues from state that one engine keeps."""
    if not route.is_chat or fields.has_unknown_salt(nvext):
        return None
    is_continued = any(fields.value(name) is not None for name in ("previous_response_id", "prompt"))
    return None if is_continued else chat_of(fields, route.route)


def parse_form(
    route: PassedRoute, model: ModelName, form: Form, reader: NvextReader = READER
) -> PassthroughCall:
    """Return the call in a form, whose routing hints are headers; raise :class:`InvalidRequest`."""
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
"""Fields that the router reads or changes in JSON bodies, and refuses in forms."""


def _check_hints(route: PassedRoute, nvext: NvExt) -> None:
    for name in ("token_data", "annotations", "prefill_worker_id"):
        if getattr(nvext, name):
            raise InvalidRequest(f"nvext.{name}: {route.route} does not take it", param=f"nvext.{name}")
    if nvext.cache_salt and not route.takes_salt:
        raise InvalidRequest(
            f"cache_salt: engines read none on {route.route}, and would share what it keeps apart",
            param="cache_salt",
        )

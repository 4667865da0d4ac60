"""Tokenizes the prompts of passed-through calls, in the router or by an engine's ``/tokenize``."""

import asyncio
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import NamedTuple

from kvrouter.core.ids import ModelName
from kvrouter.core.requests import TokenBuffer
from kvrouter.frontend.chat_renderings import ChatRenderings, UnrenderedChats
from kvrouter.frontend.instrumentation import FrontendInstrumentation
from kvrouter.frontend.openai.passthrough import PassthroughCall
from kvrouter.frontend.response_passthrough import (
    LONG_BODY_BYTES,
    PassthroughTokens,
    passthrough_tokens,
    text_ids_of,
)
from kvrouter.kernel.placement.cache_view import NoCacheView
from kvrouter.router.engine_tokenizer import ASKED_BYTES_MAX
from kvrouter.router.model_router import ModelRouter
from kvrouter.router.prompt_shapes import by_engine
from kvrouter.router.router_service import RouterService
from kvrouter.settings.tree import FrontendSettings, TokenizeFallback
from kvrouter.text.model import TextModel
from kvrouter.text.prompts.fields import PromptFields
from kvrouter.text.prompts.shape import shape_of
from kvrouter.text.prompts.tokenize import tokenize_chat, tokenize_text
from kvrouter.text.tokenizer import TOKEN_TEXT_BYTES

TOKENIZER_ON_ITS_WAY = "its tokenizer is being loaded"

CHOSEN = "its tokenizer is said to be engine"


class ModelTexts(NamedTuple):
    """The tokenizers of a frontend's models; they change as workers are announced.

    ``unread`` has the reason why the router cannot tokenize all prompts of a model; engines tokenize the
    prompts of the models ``by_engine``.
    """

    texts: Mapping[ModelName, TextModel]
    unread: Mapping[ModelName, str] = {}
    by_engine: Container[ModelName] = ()


class PromptTokenizer:
    """Turns the prompts of passed-through calls into tokens. An engine tokenizes all prompts of the models
    ``by_engine``; with ``tokenize_fallback`` also those that the router cannot tokenize, and those of blind
    shapes.
    """

    def __init__(
        self,
        service: RouterService,
        texts: ModelTexts,
        instrumentation: FrontendInstrumentation,
        settings: FrontendSettings,
    ) -> None:
        self._engines = service.engine_tokenizer
        self._renderings = ChatRenderings(instrumentation)
        self._texts, self._unread, self._by_engine = texts
        self._instrumentation = instrumentation
        self._limit_s = settings.tokenize_engine_wait_s
        self._falls_back = settings.tokenize_fallback is TokenizeFallback.ENGINE

    def tokenized_by(self, model: ModelRouter) -> str | None:
        """Return ``router`` or ``engine``, whichever tokenizes a model's prompts; None if neither does."""
        if model.fleet.takes_calls and self.why_by_load(model) is not None:
            return None
        if model.fleet.takes_calls and self._why_of_model(model) is not None:
            return "engine"
        return "router" if model.fleet.model in self._texts else None

    def why_by_load(self, model: ModelRouter) -> str | None:
        """Return why calls of a model are routed by load and text; None when the router's mode decides."""
        if not model.fleet.takes_calls:
            return None
        why_unread = self._why_unread(model.fleet.model)
        if self._why_of_model(model) is None:
            return why_unread or self._why_of_chats(model)
        why_not = self._engines.why_not(model)
        return None if why_not is None else "; ".join(filter(None, (why_unread, why_not)))

    def unrendered(self, model: ModelRouter) -> Iterable[UnrenderedChats]:
        """Return the counts of a model's chats that could not be rendered."""
        return self._renderings.counts(model.fleet.model)

    def _why_of_chats(self, model: ModelRouter) -> str | None:
        text = self._texts.get(model.fleet.model)
        if text is None or (self._falls_back and self._engines.why_not(model) is None):
            return None
        return self._renderings.why_by_load(model.fleet.model, text)

    def _why_unread(self, name: ModelName) -> str | None:
        has_tokenizer = name in self._texts or name in self._by_engine
        return self._unread.get(name, None if has_tokenizer else TOKENIZER_ON_ITS_WAY)

    def _why_of_model(self, model: ModelRouter) -> str | None:
        """Return why engines tokenize the prompts or the chats of a model; None when they do not."""
        if isinstance(model.cache, NoCacheView):
            return None
        if model.fleet.model in self._by_engine:
            return CHOSEN
        return self._why_unread(model.fleet.model) if self._falls_back else None

    def _why_of_call(self, model: ModelRouter, text: TextModel | None, shape: str) -> str | None:
        """Return why an engine tokenizes one call; None if it does not. ``shape`` is empty unless a chat."""
        why = self._why_of_model(model)
        if why is not None and (why is CHOSEN or text is None or shape):
            return why
        shapes = model.engine_reports.shapes
        if (
            not shape
            or not self._falls_back
            or isinstance(model.cache, NoCacheView)
            or not shapes.is_blind(shape)
        ):
            return None
        if shapes.is_blind(by_engine(shape)):
            return None  # its /tokenize differs from its own prompts as well
        return f"its engines make other prompts of calls of the shape {shape!r} than the router"

    async def tokens_of(
        self, passthrough: PassthroughCall, model: ModelRouter, text: TextModel | None
    ) -> tuple[PassthroughTokens, str]:
        """Return the prompt's tokens, as far as they can be known, and the shape of the call."""
        tokens, shape = await self._tokens_of(passthrough, model, text)
        if passthrough.chat is not None and text is not None and not tokens.estimate:
            self._renderings.note(model.fleet.model, tokens.missing)
        return tokens, shape

    async def _tokens_of(
        self, passthrough: PassthroughCall, model: ModelRouter, text: TextModel | None
    ) -> tuple[PassthroughTokens, str]:
        chat_shape = "" if passthrough.chat is None else shape_of(passthrough.chat)
        shape = chat_shape or passthrough.client_call.route.generates or ""
        kind = model.fleet.engine_kind
        made = None
        why = self._why_of_call(model, text, chat_shape)
        if why is None:
            made = await passthrough_tokens(passthrough, text, kind)
            if not made.is_cut or not self._falls_back or isinstance(model.cache, NoCacheView):
                return made, shape
            why = f"the prompts of some calls of the shape {shape!r} cannot be made here"
        token_ids = await self._engine_tokens(model, await self._body_of(passthrough, kind), why)
        if token_ids is not None:
            return PassthroughTokens(token_ids, is_exact=False), by_engine(shape)
        return made or await passthrough_tokens(passthrough, text, kind), shape

    async def unread_tokens(
        self, prompt: Sequence[Mapping[str, object]] | str, model: ModelRouter
    ) -> TokenBuffer | None:
        """Return an engine's tokens of a chat's messages, or of a text, that the router cannot tokenize; None
        when no engine returns them.
        """
        why = self._why_of_model(model) if model.fleet.takes_calls else None
        if why is None or len(text_ids_of(prompt)) * TOKEN_TEXT_BYTES > ASKED_BYTES_MAX:
            return None
        if isinstance(prompt, str):
            body: bytes | None = tokenize_text(prompt)
        else:
            body = tokenize_chat(PromptFields(messages=prompt), model.fleet.engine_kind)
        return await self._engine_tokens(model, body, why)

    async def _engine_tokens(self, model: ModelRouter, body: bytes | None, why: str) -> TokenBuffer | None:
        if body is None:
            return None
        token_ids = await self._engines.token_ids(model, body, limit_s=self._limit_s)
        if token_ids is not None and why != self._why_of_model(model):  # that one is shown with the model
            self._instrumentation.tokenized_by_engine(model.fleet.model, why)
        return token_ids

    @staticmethod
    async def _body_of(passthrough: PassthroughCall, engine_kind: str) -> bytes | None:
        """Return the ``/tokenize`` body for the call; None if that would not cover the prompt."""
        length_bytes = len(passthrough.client_call.body)
        has_documents = passthrough.chat is not None and passthrough.chat.documents is not None
        if (passthrough.is_partial and not has_documents) or length_bytes > ASKED_BYTES_MAX:
            return None
        if passthrough.chat is not None:
            if length_bytes > LONG_BODY_BYTES:
                return await asyncio.to_thread(tokenize_chat, passthrough.chat, engine_kind)
            return tokenize_chat(passthrough.chat, engine_kind)
        if passthrough.prompt is None or not isinstance(passthrough.prompt.content, str):
            return None
        return tokenize_text(passthrough.prompt.content)

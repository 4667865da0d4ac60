"""Tokenizes the prompts of calls that pass, here or by their engine's ``/tokenize``."""

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
    estimated_tokens,
    passthrough_tokens,
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

    ``unread`` are the reasons why prompts of a model cannot be read here, in whole or in part; those of
    models ``by_engine`` are tokenized by their engines.
    """

    texts: Mapping[ModelName, TextModel]
    unread: Mapping[ModelName, str] = {}
    by_engine: Container[ModelName] = ()


class PromptTokenizer:
    """Turns the prompt of a call that passes into tokens. Engines are asked about all prompts of the models
    ``by_engine``; where the settings say so, also about those that are unread, and about those of blind
    shapes.
    """

    def __init__(
        self,
        service: RouterService,
        texts: ModelTexts,
        observed: FrontendInstrumentation,
        settings: FrontendSettings,
    ) -> None:
        self._engines = service.engine_tokenizer
        self._renderings = ChatRenderings(observed)
        self._texts, self._unread, self._by_engine = texts
        self._observed = observed
        self._limit_s = settings.tokenize_engine_wait_s
        self._falls_back = settings.tokenize_fallback is TokenizeFallback.ENGINE

    def tokenized_by(self, model: ModelRouter) -> str | None:
        """Who tokenizes the prompts of a model: ``router``, ``engine``, or None where they are not known."""
        if model.fleet.takes_calls and self.why_by_load(model) is not None:
            return None
        if model.fleet.takes_calls and self._why_of_model(model) is not None:
            return "engine"
        return "router" if model.fleet.model in self._texts else None

    def why_by_load(self, model: ModelRouter) -> str | None:
        """Why calls of a model are routed by load alone; None where what is cached counts, as far as the
        router's mode lets it.
        """
        if not model.fleet.takes_calls:
            return None
        why_unread = self._why_unread(model.fleet.model)
        if self._why_of_model(model) is None:
            return why_unread or self._why_of_chats(model)
        why_not = self._engines.why_not(model)
        return None if why_not is None else "; ".join(filter(None, (why_unread, why_not)))

    def unrendered(self, model: ModelRouter) -> Iterable[UnrenderedChats]:
        """Which chats of a model are not made into prompts here."""
        return self._renderings.counts(model.fleet.model)

    def _why_of_chats(self, model: ModelRouter) -> str | None:
        text = self._texts.get(model.fleet.model)
        if text is None or (self._falls_back and self._engines.why_not(model) is None):
            return None
        return self._renderings.why_by_load(model.fleet.model, text)

    def _why_unread(self, name: ModelName) -> str | None:
        is_known = name in self._texts or name in self._by_engine
        return self._unread.get(name, None if is_known else TOKENIZER_ON_ITS_WAY)

    def _why_of_model(self, model: ModelRouter) -> str | None:
        """Why engines are asked about the prompts of a model, or about its chats; None where they are not."""
        if isinstance(model.cache, NoCacheView):
            return None
        if model.fleet.model in self._by_engine:
            return CHOSEN
        return self._why_unread(model.fleet.model) if self._falls_back else None

    def _why_of_call(self, model: ModelRouter, text: TextModel | None, shape: str) -> str | None:
        """Why an engine is asked about the prompt of one call; without a ``shape`` it is no chat."""
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
            return None  # what its /tokenize answers is not what it does
        return f"its engines make other prompts of calls of the shape {shape!r} than the router"

    async def tokens_of(
        self, passed: PassthroughCall, model: ModelRouter, text: TextModel | None
    ) -> tuple[PassthroughTokens, str]:
        """Return what routing may know of the prompt, and the shape of the call."""
        tokens, shape = await self._tokens_of(passed, model, text)
        if passed.chat is not None and text is not None and not tokens.estimate:
            self._renderings.note(model.fleet.model, tokens.missing)
        return tokens, shape

    async def _tokens_of(
        self, passed: PassthroughCall, model: ModelRouter, text: TextModel | None
    ) -> tuple[PassthroughTokens, str]:
        shape = "" if passed.chat is None else shape_of(passed.chat)
        kind = model.fleet.engine_kind
        made = None
        why = self._why_of_call(model, text, shape)
        if why is None:
            made = await passthrough_tokens(passed, text, kind)
            if not made.is_cut or not self._falls_back or isinstance(model.cache, NoCacheView):
                return made, shape
            why = f"the prompts of some calls of the shape {shape!r} cannot be made here"
        asked = await self._asked(model, await self._body_of(passed, kind), why)
        if asked is not None:
            return PassthroughTokens(asked, is_exact=False), by_engine(shape)
        return made or await passthrough_tokens(passed, text, kind), shape

    async def unread_tokens(
        self, prompt: Sequence[Mapping[str, object]] | str, model: ModelRouter
    ) -> TokenBuffer | None:
        """Return the tokens of a chat's messages, or of a text, that cannot be read here; None where no
        engine says them.
        """
        why = self._why_of_model(model) if model.fleet.takes_calls else None
        if why is None or estimated_tokens(prompt) * TOKEN_TEXT_BYTES > ASKED_BYTES_MAX:
            return None
        if isinstance(prompt, str):
            body: bytes | None = tokenize_text(prompt)
        else:
            body = tokenize_chat(PromptFields(messages=prompt), model.fleet.engine_kind)
        return await self._asked(model, body, why)

    async def _asked(self, model: ModelRouter, body: bytes | None, why: str) -> TokenBuffer | None:
        if body is None:
            return None
        token_ids = await self._engines.token_ids(model, body, limit_s=self._limit_s)
        if token_ids is not None and why != self._why_of_model(model):  # that is said of the model
            self._observed.tokenized_by_engine(model.fleet.model, why)
        return token_ids

    @staticmethod
    async def _body_of(passed: PassthroughCall, engine_kind: str) -> bytes | None:
        """What an engine is asked about the call; None for a prompt that it would not tokenize as a whole."""
        length_bytes = len(passed.client_call.body)
        has_documents = passed.chat is not None and passed.chat.documents is not None
        if (passed.is_partial and not has_documents) or length_bytes > ASKED_BYTES_MAX:
            return None
        if passed.chat is not None:
            if length_bytes > LONG_BODY_BYTES:
                return await asyncio.to_thread(tokenize_chat, passed.chat, engine_kind)
            return tokenize_chat(passed.chat, engine_kind)
        if passed.prompt is None or not isinstance(passed.prompt.content, str):
            return None
        return tokenize_text(passed.prompt.content)

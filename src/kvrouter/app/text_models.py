"""Text models of a frontend: tokenizers and chat templates, loaded as workers register models."""

import asyncio
import dataclasses
import logging
from collections import Counter
from collections.abc import Mapping, Set
from functools import partial
from types import MappingProxyType

from kvrouter.core.errors import ConfigError, KvrouterError
from kvrouter.core.ids import Epoch, ModelName, WorkerId
from kvrouter.core.workers import CONTEXT_TOKENS_UNKNOWN, WorkerCard
from kvrouter.frontend.engine_tokens import CHOSEN, TOKENIZER_ON_ITS_WAY, ModelTexts
from kvrouter.settings.tree import FrontendSettings, TokenizeFallback
from kvrouter.telemetry import Event, log_event
from kvrouter.text.model import TextModel
from kvrouter.text.source import ENGINE_TOKENIZER, MOCK_TOKENIZER, tokenizer_folder
from kvrouter.text.tokenizer import TOKEN_TEXT_BYTES, EncodeLimits, EncodePool
from kvrouter.transports.records.port import Gone

TEXTS_MAX = 256
"""The most models of which one frontend holds tokenizers."""

LOG_AFTER_S = 5.0
"""Seconds after which a tokenizer that is still loading is logged: calls are routed by load meanwhile."""

RETRY_S = 60.0
"""Seconds until a failed load is retried: a hub may be reachable again, a folder mounted."""

NO_TOKENIZER = "its workers name no tokenizer that can be read here"

REMEDY = (
    "name the folder or the Hugging Face repository of the engine's tokenizer: tokenizer in the fleet file, "
    "--model-path, or --tokenizer of its worker; or engine there, to have its engines asked at /tokenize"
)

_log = logging.getLogger("kvrouter.frontend")


def encode_pool(front: FrontendSettings) -> EncodePool:
    """Return the thread pool that tokenizes for one frontend, with the limits of its settings."""
    return EncodePool(
        EncodeLimits(
            off_loop_chars=front.tokenize_inline_max_chars,
            bytes_max=front.tokenize_max_bytes,
            waiting_max=front.tokenize_waiting_max,
            wait_s=front.tokenize_wait_s,
            token_max_chars=front.token_max_chars,
        )
    )


class TextModelLoader:
    """Loads a model's tokenizer when its first worker registers, off the event loop.

    ``sources`` are this host's own, by model; for other models the tokenizer that the cards name is read, a
    folder or a Hugging Face repository: of the readable ones that of most workers, among equals the one in
    use. ``given`` are loaded already. :attr:`texts` are the loaded ones, :attr:`unread` the reasons why
    prompts of a model cannot be tokenized here, in whole or in part, and :attr:`by_engine` the models that
    their engines tokenize; :attr:`of_models` has all three.

    A model whose tokenizer cannot be loaded has workers but no text: its calls are routed by load where its
    engines tokenize, and refused where they take tokens. Loading is retried at the next registration and
    after :data:`RETRY_S`.
    """

    def __init__(
        self,
        sources: Mapping[ModelName, str],
        pool: EncodePool,
        given: Mapping[ModelName, TextModel] | None = None,
        fallback: TokenizeFallback = TokenizeFallback.NONE,
    ) -> None:
        self._fallback = fallback
        self._sources = sources
        self._pool = pool
        self._texts: dict[ModelName, TextModel] = dict(given or {})
        self.texts: Mapping[ModelName, TextModel] = MappingProxyType(self._texts)
        self._unread: dict[ModelName, str] = {}
        self.unread: Mapping[ModelName, str] = MappingProxyType(self._unread)
        self._by_engine: set[ModelName] = set()
        self.by_engine: Set[ModelName] = self._by_engine
        self.of_models = ModelTexts(self.texts, self.unread, self.by_engine)
        self._loading: dict[ModelName, asyncio.Task[None]] = {}
        self._cards: dict[WorkerId, WorkerCard] = {}
        self._loaded_from: dict[ModelName, str] = {}
        self._retries: dict[ModelName, asyncio.TimerHandle] = {}
        self._failed: dict[ModelName, set[str]] = {}
        self._over_budget: set[ModelName] = set()
        for model in self._texts:
            self._log_why_slow(model)
            self._check_budget(model)

    def on_card(self, card: WorkerCard) -> None:
        """Handle a new or changed card."""
        self._cards[card.worker_id] = card
        self._fit(card.model)
        if card.model in self._loading:
            return
        named = self._named(card)
        if named == ENGINE_TOKENIZER and card.takes_calls:
            self._tokenize_by_engine(card)
            return
        is_loaded = card.model in self._texts
        if is_loaded and self._loaded_from.get(card.model, named) == named:
            return
        if not is_loaded and not self._has_room():
            self._refuse(card, f"{TEXTS_MAX} models are loaded already")
            return
        if not named:
            self._refuse(card, NO_TOKENIZER)
            return
        task = asyncio.get_running_loop().create_task(self._load(card, named))
        self._loading[card.model] = task

    def _tokenize_by_engine(self, card: WorkerCard) -> None:
        self._unread.pop(card.model, None)
        if card.model not in self._by_engine:
            self._by_engine.add(card.model)
            log_event(_log, Event.TOKENIZED_BY_ENGINE, model=card.model, reason=CHOSEN)

    def _fit(self, model: ModelName) -> None:
        """Set the context length of a loaded model's text to the longest that its workers state."""
        if model not in self._loaded_from:
            return
        text, of_model = self._texts[model], (each for each in self._cards.values() if each.model == model)
        longest = max((_context_tokens(card) for card in of_model), default=text.context_length_tokens)
        if longest != text.context_length_tokens:
            self._texts[model] = dataclasses.replace(text, context_length_tokens=longest)
            self._check_budget(model)

    def _log_why_slow(self, model: ModelName) -> None:
        tokenizer, log = self._texts[model].tokenizer, partial(log_event, _log, Event.TOKENIZED_SLOWLY)
        tokenizer.when_slow(model, lambda why: log(model=model, reason=why))
        if tokenizer.why_slow is not None:
            log(model=model, reason=tokenizer.why_slow)

    def _check_budget(self, model: ModelName) -> None:
        """Log once when a prompt that fills the model's context is too long to be tokenized here."""
        stated = [each.context_length for each in self._cards.values() if each.model == model]
        if stated and not any(stated):
            return
        tokens = self._texts[model].context_length_tokens
        text_bytes = TOKEN_TEXT_BYTES * tokens
        cost = self._texts[model].tokenizer.encode_cost(text_bytes)
        most_bytes = self._pool.text_max_bytes(cost)
        if text_bytes <= most_bytes or model in self._over_budget:
            return
        self._over_budget.add(model)
        log_event(
            _log,
            Event.TOKENIZE_BUDGET_SMALL,
            model=model,
            detail=f"a context of {tokens} tokens is about {text_bytes} bytes of text, and at most "
            f"{most_bytes} are tokenized: set KVROUTER_TOKENIZE_MAX_BYTES to "
            f"{cost.bytes_per_byte * text_bytes}",
        )

    def _named(self, card: WorkerCard) -> str:
        """The tokenizer of the card's model: this host's own, else that of most of its workers, else ""."""
        own = self._sources.get(card.model)
        if own is not None:
            return own
        of_model = [each for each in self._cards.values() if each.model == card.model]
        stated = Counter(each.tokenizer for each in of_model if each.tokenizer)
        in_use = self._loaded_from.get(card.model)
        failed = self._failed.get(card.model, set())
        return max(
            stated, key=lambda named: (named not in failed, stated[named], named == in_use), default=""
        )

    def on_gone(self, worker_id: WorkerId, incarnation: Epoch, _why: Gone) -> None:
        """Handle a removed card; its model's tokenizer stays loaded until the room is needed."""
        known = self._cards.get(worker_id)
        if known is not None and known.incarnation == incarnation:
            del self._cards[worker_id]
            self._fit(known.model)

    def _has_room(self) -> bool:
        """Whether one more model may be loaded; the oldest model without workers is dropped to make room."""
        if len(self._texts.keys() | self._loading.keys()) < TEXTS_MAX:
            return True
        served = {card.model for card in self._cards.values()}
        unused = next((model for model in self._texts if model not in served), None)
        if unused is None:
            return False
        del self._texts[unused]
        self._loaded_from.pop(unused, None)
        self._over_budget.discard(unused)
        return True

    async def _load(self, card: WorkerCard, named: str) -> None:
        model, loop = card.model, asyncio.get_running_loop()
        late = loop.call_later(LOG_AFTER_S, self._log_by_load, card, f"{named}: {TOKENIZER_ON_ITS_WAY}")
        try:
            text = await asyncio.to_thread(self._read, card, named)
            self._texts[model] = text
            self._by_engine.discard(model)
            self._loaded_from[model] = named
            self._failed.pop(model, None)
            was_unread = self._unread.pop(model, None)
            self._fit(model)
            self._log_why_slow(model)
            self._check_budget(model)
            if text.template is not None and text.template.fault is not None:
                log_event(_log, Event.CHAT_TEMPLATE_FAILED, model=model, reason=text.template.fault)
            if text.unread is not None and card.takes_calls:
                self._log_by_load(card, f"{named}: {text.unread}")
            elif was_unread is not None:
                log_event(_log, Event.ROUTED_BY_CACHE, model=model, detail=named)
        except (KvrouterError, OSError, ValueError) as error:
            self._failed.setdefault(model, set()).add(named)
            self._refuse(card, str(error) if named in str(error) else f"{named}: {error}")
            if model not in self._retries:
                self._retries[model] = loop.call_later(RETRY_S, self._try_again, model)
        finally:
            late.cancel()
            del self._loading[model]

    def _try_again(self, model: ModelName) -> None:
        del self._retries[model]
        card = next((card for card in self._cards.values() if card.model == model), None)
        if card is not None and model not in self._texts:
            self.on_card(card)

    def _read(self, card: WorkerCard, source: str) -> TextModel:
        return read_text(
            source,
            context_length_tokens=_context_tokens(card),
            pool=self._pool,
            takes_calls=card.takes_calls,
        )

    async def loaded(self, limit_s: float | None = None) -> None:
        """Wait until running loads have ended, for at most ``limit_s`` seconds."""
        if self._loading:
            await asyncio.wait(self._loading.values(), timeout=limit_s)

    def _refuse(self, card: WorkerCard, why: str) -> None:
        if card.takes_calls and card.model not in self._texts:  # else the former tokenizer stays in use
            self._log_by_load(card, why)
        else:
            log_event(_log, Event.TOKENIZER_FAILED, model=card.model, worker=str(card.worker_id), reason=why)

    def _log_by_load(self, card: WorkerCard, why: str) -> None:
        """Log a reason once for as long as it lasts."""
        if self._unread.get(card.model) != why:
            self._unread[card.model] = why
            is_asked = self._fallback is TokenizeFallback.ENGINE
            log_event(
                _log,
                Event.TOKENIZED_BY_ENGINE if is_asked else Event.ROUTED_BY_LOAD,
                model=card.model,
                worker=str(card.worker_id),
                reason=why,
                detail=REMEDY,
            )


def read_text(source: str, *, context_length_tokens: int, pool: EncodePool, takes_calls: bool) -> TextModel:
    """Read a tokenizer for a model whose engines take calls as written (``takes_calls``) or tokens. Blocks.

    Raises ConfigError for an unreadable one, and for the mock's tokenizer before engines that take calls.
    """
    if source == MOCK_TOKENIZER and takes_calls:
        raise ConfigError("the token ids of tokenizer mock are not the engine's", param="tokenizer")
    folder = tokenizer_folder(source)
    return TextModel.load(
        folder, context_length_tokens=context_length_tokens, pool=pool, needs_template=not takes_calls
    )


def _context_tokens(card: WorkerCard) -> int:
    return card.context_length or CONTEXT_TOKENS_UNKNOWN

"""The tokenizers of a frontend, loaded as workers register models."""

import asyncio
import dataclasses
import logging
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from kvrouter.config import FrontendSettings
from kvrouter.core.errors import KvrouterError
from kvrouter.core.ids import Epoch, ModelName, WorkerId
from kvrouter.core.workers import WorkerCard
from kvrouter.telemetry import Event, log_event
from kvrouter.text.model import TextModel
from kvrouter.text.source import tokenizer_folder
from kvrouter.text.tokenizer import EncodeLimits, EncodePool
from kvrouter.transports.discovery.port import Gone

TEXTS_MAX = 256
"""How many models one frontend holds tokenizers of."""

TOKEN_TEXT_BYTES = 4
"""The text of a token, on the average of English prose and code."""

_log = logging.getLogger("kvrouter.frontend")


def encode_pool(front: FrontendSettings) -> EncodePool:
    """Return the threads that tokenize for one frontend, with the limits of its settings."""
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
    """Loads a model's tokenizer when its first worker is announced, off the event loop.

    ``folders`` are this host's own, by model; without one what the cards name is read, a folder or a Hugging
    Face repository: what most of the model's workers name of those that can be read, the one in use among
    equals. ``given`` are loaded already. :attr:`texts` are those that are loaded.

    A model whose tokenizer cannot be loaded has workers and no text: its requests are refused, and the next
    announcement tries again.
    """

    def __init__(
        self,
        folders: Mapping[ModelName, Path],
        pool: EncodePool,
        given: Mapping[ModelName, TextModel] | None = None,
    ) -> None:
        self._folders = folders
        self._pool = pool
        self._texts: dict[ModelName, TextModel] = dict(given or {})
        self.texts: Mapping[ModelName, TextModel] = MappingProxyType(self._texts)
        self._loading: dict[ModelName, asyncio.Task[None]] = {}
        self._cards: dict[WorkerId, WorkerCard] = {}
        self._loaded_from: dict[ModelName, str] = {}
        self._failed: dict[ModelName, set[str]] = {}
        self._over_budget: set[ModelName] = set()
        for model in self._texts:
            self._check_budget(model)

    def on_card(self, card: WorkerCard) -> None:
        """A worker was announced."""
        self._cards[card.worker_id] = card
        self._fit(card.model)
        if card.model in self._loading:
            return
        named = self._named(card)
        is_loaded = card.model in self._texts
        if is_loaded and self._loaded_from.get(card.model, named) == named:
            return
        if not is_loaded and not self._has_room():
            self._refuse(card, f"{TEXTS_MAX} models are loaded already")
            return
        if not named:
            self._refuse(card, "its workers name no tokenizer: give its folder with --model-path")
            return
        task = asyncio.get_running_loop().create_task(self._load(card, named))
        self._loading[card.model] = task

    def _fit(self, model: ModelName) -> None:
        """Let the text of a model that workers announced have the longest context of them."""
        if model not in self._loaded_from:
            return
        text, of_model = self._texts[model], (each for each in self._cards.values() if each.model == model)
        longest = max((card.context_length for card in of_model), default=text.context_length_tokens)
        if longest != text.context_length_tokens:
            self._texts[model] = dataclasses.replace(text, context_length_tokens=longest)
            self._check_budget(model)

    def _check_budget(self, model: ModelName) -> None:
        """Log once for a model that a text of its context's length is too long to be tokenized here."""
        tokens = self._texts[model].context_length_tokens
        text_bytes = TOKEN_TEXT_BYTES * tokens
        if text_bytes <= self._pool.text_max_bytes or model in self._over_budget:
            return
        self._over_budget.add(model)
        log_event(
            _log,
            Event.TOKENIZE_BUDGET_SMALL,
            model=model,
            detail=f"a context of {tokens} tokens is about {text_bytes} bytes of text, and at most "
            f"{self._pool.text_max_bytes} are tokenized: set KVROUTER_TOKENIZE_MAX_BYTES to "
            f"{self._pool.needed_bytes(text_bytes)}",
        )

    def _named(self, card: WorkerCard) -> str:
        """Where the tokenizer of the card's model is: as this host says, else as most of its workers do; ""
        where none does.
        """
        own = self._folders.get(card.model)
        if own is not None:
            return str(own)
        of_model = [each for each in self._cards.values() if each.model == card.model]
        said = Counter(each.tokenizer for each in of_model if each.tokenizer)
        in_use = self._loaded_from.get(card.model)
        failed = self._failed.get(card.model, set())
        return max(said, key=lambda named: (named not in failed, said[named], named == in_use), default="")

    def on_gone(self, worker_id: WorkerId, incarnation: Epoch, _why: Gone) -> None:
        """A worker left; its model's tokenizer stays for the next one, until the room is needed."""
        known = self._cards.get(worker_id)
        if known is not None and known.incarnation == incarnation:
            del self._cards[worker_id]
            self._fit(known.model)

    def _has_room(self) -> bool:
        """Whether one more model may be loaded; the oldest that has no workers any more makes room for it."""
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
        try:
            self._texts[card.model] = await asyncio.to_thread(self._read, card, named)
            self._loaded_from[card.model] = named
            self._failed.pop(card.model, None)
            self._fit(card.model)
            self._check_budget(card.model)
        except (KvrouterError, OSError, ValueError) as error:
            self._failed.setdefault(card.model, set()).add(named)
            self._refuse(card, f"{named}: {error}")
        finally:
            del self._loading[card.model]

    def _read(self, card: WorkerCard, source: str) -> TextModel:
        folder = tokenizer_folder(source)
        return TextModel.load(folder, context_length_tokens=card.context_length, pool=self._pool)

    async def loaded(self) -> None:
        """Wait for what is being loaded."""
        await asyncio.gather(*self._loading.values(), return_exceptions=True)

    @staticmethod
    def _refuse(card: WorkerCard, why: str) -> None:
        log_event(_log, Event.TOKENIZER_FAILED, model=card.model, worker=str(card.worker_id), reason=why)

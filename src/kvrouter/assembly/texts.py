"""The tokenizers of a frontend that meets its models one by one, as workers announce them."""

import asyncio
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

from kvrouter.config import FrontendSettings
from kvrouter.core.errors import KvrouterError
from kvrouter.core.ids import Epoch, ModelName, WorkerId
from kvrouter.core.workers import WorkerCard
from kvrouter.planes.discovery.port import Gone
from kvrouter.telemetry import Event, log_event
from kvrouter.text.encode_pool import EncodeLimits, EncodePool
from kvrouter.text.model import TextModel
from kvrouter.text.source import tokenizer_folder

TEXTS_MAX = 256
"""How many models one frontend holds tokenizers of."""

_log = logging.getLogger("kvrouter.frontend")


def encode_pool(front: FrontendSettings) -> EncodePool:
    """Return the threads that tokenize for one front door, with the limits of its settings."""
    return EncodePool(
        EncodeLimits(
            off_loop_chars=front.tokenize_inline_max_chars,
            bytes_max=front.tokenize_max_bytes,
            waiting_max=front.tokenize_waiting_max,
            wait_s=front.tokenize_wait_s,
            token_max_chars=front.token_max_chars,
        )
    )


class AnnouncedTexts(Mapping[ModelName, TextModel]):
    """Loads a model's tokenizer when its first worker is announced, off the event loop.

    ``folders`` are this host's own, by model; without one what the worker's card names is read: a folder, or
    a Hugging Face repository.
    ``texts`` are loaded already.
    A model whose tokenizer cannot be loaded has workers and no text: its requests are refused, and the next
    announcement tries again.
    """

    def __init__(
        self,
        folders: Mapping[ModelName, Path],
        pool: EncodePool,
        texts: Mapping[ModelName, TextModel] | None = None,
    ) -> None:
        self._folders = folders
        self._pool = pool
        self._texts: dict[ModelName, TextModel] = dict(texts or {})
        self._loading: dict[ModelName, asyncio.Task[None]] = {}
        self._model_of: dict[WorkerId, tuple[Epoch, ModelName]] = {}

    def __getitem__(self, model: ModelName) -> TextModel:
        return self._texts[model]

    def __iter__(self) -> Iterator[ModelName]:
        return iter(self._texts)

    def __len__(self) -> int:
        return len(self._texts)

    def on_card(self, card: WorkerCard) -> None:
        """A worker was announced."""
        self._model_of[card.worker_id] = (card.incarnation, card.model)
        known = self._texts.get(card.model)
        if card.model in self._loading or (
            known is not None and known.context_length_tokens == card.context_length
        ):
            return
        if known is None and not self._has_room():
            self._refuse(card, f"{TEXTS_MAX} models are loaded already")
            return
        folder = self._folders.get(card.model)
        if folder is None and card.tokenizer is None:
            self._refuse(card, "its workers name no tokenizer: give its folder with --model-path")
            return
        source = str(card.tokenizer if folder is None else folder)
        task = asyncio.get_running_loop().create_task(self._load(card, source))
        self._loading[card.model] = task

    def on_gone(self, worker_id: WorkerId, incarnation: Epoch, _why: Gone) -> None:
        """A worker left; its model's tokenizer stays for the next one, until the room is needed."""
        known = self._model_of.get(worker_id)
        if known is not None and known[0] == incarnation:
            del self._model_of[worker_id]

    def _has_room(self) -> bool:
        """Whether one more model may be loaded; the oldest that has no workers any more makes room for it."""
        if len(self._texts.keys() | self._loading.keys()) < TEXTS_MAX:
            return True
        served = {model for _, model in self._model_of.values()}
        unused = next((model for model in self._texts if model not in served), None)
        if unused is None:
            return False
        del self._texts[unused]
        return True

    async def _load(self, card: WorkerCard, source: str) -> None:
        try:
            self._texts[card.model] = await asyncio.to_thread(self._read, card, source)
        except (KvrouterError, OSError, ValueError) as error:
            self._refuse(card, f"{source}: {error}")
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

"""What bodies may hold, and reading them so that nobody else waits for a long one."""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

from kvrouter.config import FrontendSettings
from kvrouter.core.ids import ModelName
from kvrouter.fleet import Fleet
from kvrouter.frontend.observed import FrontObserved
from kvrouter.frontend.openai.scanned import NUMBERS_MIN, BodyBounds, BodyOverBounds, ScannedBody, scanned
from kvrouter.service.router import RouterService
from kvrouter.text.model import TextModel

OFF_LOOP_BYTES = 128 * 1024
"""A longer body is read in a thread: a tenth of a millisecond to scan, some tenths to decode."""

THREADS = 2
NUMBERS_MAX = 16_777_216
"""Token ids, though a worker say that its context is longer."""

Parsed = TypeVar("Parsed")


class Bodies:
    """Scans and parses the bodies of one door; :meth:`close` ends its threads.

    A body that is refused costs one scan, without the interpreter. One that is not costs what its bounds
    allow to be built of it.
    """

    def __init__(
        self,
        service: RouterService,
        texts: Mapping[ModelName, TextModel],
        observed: FrontObserved,
        settings: FrontendSettings,
    ) -> None:
        self._service = service
        self._texts = texts
        self._observed = observed
        self._settings = settings
        self._bounds = BodyBounds(
            depth=settings.body_max_depth,
            values=settings.body_max_values,
            items=settings.body_max_items,
            numbers=settings.body_max_token_ids or NUMBERS_MIN,
        )
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="kvrouter-body")

    async def scan(self, data: bytes) -> ScannedBody:
        """Look through a body; raise :class:`InvalidRequest` with the field's path as ``param``."""
        try:
            if len(data) <= OFF_LOOP_BYTES:
                return scanned(data, self._bounds)
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, scanned, data, self._bounds_of(data))
        except BodyOverBounds as refused:
            self._observed.body_refused(refused.bound)
            raise

    async def parse(self, body: ScannedBody, parse: Callable[[ScannedBody], Parsed]) -> Parsed:
        """Return ``parse(body)``."""
        if len(body.data) <= OFF_LOOP_BYTES:
            return parse(body)
        return await asyncio.get_running_loop().run_in_executor(self._threads, parse, body)

    async def read(self, data: bytes, parse: Callable[[ScannedBody], Parsed]) -> Parsed:
        """Scan and parse."""
        return await self.parse(await self.scan(data), parse)

    def close(self) -> None:
        """Read no more bodies."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _bounds_of(self, data: bytes) -> BodyBounds:
        """The bounds of a long body: as many token ids as the longest context here holds."""
        if self._settings.body_max_token_ids is not None or len(data) < 2 * NUMBERS_MIN:
            return self._bounds
        contexts = [text.context_length_tokens for text in self._texts.values()]
        contexts += [_context_tokens(model.fleet) for model in self._service.models()]
        numbers = min(NUMBERS_MAX, max(NUMBERS_MIN, *contexts, 0))
        return replace(self._bounds, numbers=numbers)


def _context_tokens(fleet: Fleet) -> int:
    return max((card.context_length for card in fleet), default=0)

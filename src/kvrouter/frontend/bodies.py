"""Request bodies: their bounds, and parsing large ones off the event loop."""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

from kvrouter.config import FrontendSettings
from kvrouter.core.ids import ModelName
from kvrouter.frontend.http import BodyLimit
from kvrouter.frontend.instrumentation import FrontendInstrumentation
from kvrouter.frontend.openai.scanned import NUMBERS_MIN, BodyBounds, BodyOverBounds, ScannedBody, scanned
from kvrouter.frontend.prepare import served_text
from kvrouter.service.router import RouterService
from kvrouter.text.model import TextModel

OFF_LOOP_BYTES = 128 * 1024
"""A longer body is read in a thread: a tenth of a millisecond to scan, some tenths to decode."""

THREADS = 2
BODY_BYTES_MAX = 64 * 1024 * 1024
"""No body is longer than this unless a setting says so, whatever contexts could need."""

PAGE_BYTES_MAX = 64 * 1024
"""For the routes of operators, whose bodies are a few numbers."""

BESIDE_PROMPT_BYTES = 2 * 1024 * 1024
"""The rest of a body, next to the text of a prompt: names of fields, quotes, everything that is no prompt."""

ESCAPED_BYTES_PER_BYTE = 3
"""JSON that is written in ASCII has six bytes for a character of two, and twelve for one of four."""

TOKEN_CHARS_MIN = 16
"""Characters of a token, though the longest of a vocabulary be shorter: escaped ones are written longer."""

TOKEN_ID_BYTES = 12
"""A token id in a list: ten digits, a comma, a space."""

NUMBERS_MAX = 16_777_216
"""Token ids, though a worker say that its context is longer."""

Parsed = TypeVar("Parsed")


class Bodies:
    """Scans and parses the bodies of one HTTP app; :meth:`close` ends its threads.

    A body that is refused costs one scan, without the interpreter. One that is not costs what its bounds
    allow to be built of it.
    """

    def __init__(
        self,
        service: RouterService,
        texts: Mapping[ModelName, TextModel],
        observed: FrontendInstrumentation,
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
            text_bytes=settings.body_max_text_bytes,
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

    def prompt_limit(self) -> BodyLimit:
        """Return how long a body with a prompt may be: what the longest context here can need."""
        if self._settings.body_max_bytes is not None:
            return BodyLimit(self._settings.body_max_bytes, "as KVROUTER_BODY_MAX_BYTES says")
        needed_bytes: list[int] = []
        for model in self._service.models():
            needed_bytes.append(TOKEN_ID_BYTES * (model.fleet.context_length_tokens or 0))
            if model.fleet.takes_calls:
                needed_bytes.append(BODY_BYTES_MAX)  # its calls may hold images, of which nobody here knows
        for name, text in self._texts.items():
            # Of a model without any worker so far nobody knows whether it takes calls.
            router = self._service.find(name)
            needed = BODY_BYTES_MAX if router is None else _needed_bytes(served_text(text, router))
            needed_bytes.append(needed)
        most_bytes = max(needed_bytes, default=BODY_BYTES_MAX)
        return BodyLimit(
            min(BODY_BYTES_MAX, BESIDE_PROMPT_BYTES + most_bytes),
            "which no prompt for the longest context here needs; KVROUTER_BODY_MAX_BYTES sets another limit",
        )

    def page_limit(self) -> BodyLimit:
        """Return how long the body of an operator's route may be."""
        return BodyLimit(PAGE_BYTES_MAX, "which no body of this route needs")

    def close(self) -> None:
        """Read no more bodies."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _bounds_of(self, data: bytes) -> BodyBounds:
        """The bounds of a long body: as many token ids as the longest context here holds."""
        if self._settings.body_max_token_ids is not None or len(data) < 2 * NUMBERS_MIN:
            return self._bounds
        texts = (served_text(text, self._service.find(name)) for name, text in self._texts.items())
        contexts = [text.context_length_tokens for text in texts]
        contexts += [model.fleet.context_length_tokens or 0 for model in self._service.models()]
        numbers = min(NUMBERS_MAX, max(NUMBERS_MIN, *contexts, 0))
        return replace(self._bounds, numbers=numbers)


def _needed_bytes(text: TextModel) -> int:
    """How long the text of a prompt may be in JSON."""
    chars = max(text.prompt_max_chars, TOKEN_CHARS_MIN * text.context_length_tokens)
    return max(ESCAPED_BYTES_PER_BYTE * chars, TOKEN_ID_BYTES * text.context_length_tokens)

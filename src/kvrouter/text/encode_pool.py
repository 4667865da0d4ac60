"""Encoding beside the event loop: a long prompt takes milliseconds, and streams must not wait for it."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kvrouter.core.errors import Unavailable
from kvrouter.core.requests import TokenBuffer

OFF_LOOP_CHARS = 8_192
"""About one millisecond of encoding; a hop to a thread and back costs a tenth of that."""

T = TypeVar("T")


class EncodePoolFull(Unavailable):
    """More long prompts wait for a thread than the pool admits."""

    code = "encode_pool_full"


class EncodePool:
    """A few threads that encode long prompts; shared by all models of a process."""

    def __init__(
        self, *, off_loop_chars: int = OFF_LOOP_CHARS, threads: int = 2, prompts_max: int = 256
    ) -> None:
        """Prompts above ``off_loop_chars`` go to a thread, at most ``prompts_max`` at once."""
        self._off_loop_chars = off_loop_chars
        self._prompts_max = prompts_max
        self._prompts = 0
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="kvrouter-encode")

    def leaves_loop(self, chars: int) -> bool:
        """Whether a prompt of so many characters is encoded in a thread."""
        return chars > self._off_loop_chars

    async def encode(self, encode: Callable[[T], TokenBuffer], prompt: T, *, chars: int) -> TokenBuffer:
        """Return ``encode(prompt)``, of ``chars`` characters; ``EncodePoolFull`` if too many long ones wait.

        A caller that is cancelled gives its place up; encoding that has begun ends unheard.
        """
        if not self.leaves_loop(chars):
            return encode(prompt)
        if self._prompts >= self._prompts_max:
            raise EncodePoolFull(f"{self._prompts} long prompts wait to be encoded")
        self._prompts += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, encode, prompt)
        finally:
            self._prompts -= 1

    def close(self) -> None:
        """Take no more prompts and end the threads once what they hold is encoded."""
        self._threads.shutdown(wait=False, cancel_futures=True)

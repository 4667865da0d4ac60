"""The answer of a decode leg that fetches its KV from a prefill worker."""

from kvrouter.core.requests import EngineChunk, FinishReason, KvLoss
from kvrouter.engines.openai.server import EngineFailed, EngineFailedLater
from kvrouter.planes.requests.port import EngineStream


class FetchingStream:
    """Takes an engine that fails such a leg before its first token to have got no KV: it does not say why it
    failed, and that is why most do. The leg is then prefilled again, and nobody is blamed.
    """

    def __init__(self, inner: EngineStream) -> None:
        self._inner = inner
        self._has_begun = False

    def __aiter__(self) -> "FetchingStream":
        return self

    async def __anext__(self) -> EngineChunk:
        try:
            chunk = await self._inner.__anext__()
        except (EngineFailed, EngineFailedLater) as error:
            if self._has_begun:
                raise
            return kv_lost(error.message)
        self._has_begun = True
        return chunk

    def cancel(self, reason: str) -> None:
        """Tell the engine to stop. Idempotent."""
        self._inner.cancel(reason)


class LostStream:
    """The answer of a decode leg that failed before it began."""

    def __init__(self, why: str) -> None:
        self._why = why
        self._is_over = False

    def __aiter__(self) -> "LostStream":
        return self

    async def __anext__(self) -> EngineChunk:
        if self._is_over:
            raise StopAsyncIteration
        self._is_over = True
        return kv_lost(self._why)

    def cancel(self, reason: str) -> None:
        """Nothing runs."""


def kv_lost(why: str) -> EngineChunk:
    """Return the only chunk of a leg that did not get its KV."""
    return EngineChunk(finish=FinishReason.ERROR, error=why, kv_lost=KvLoss.BROKEN)

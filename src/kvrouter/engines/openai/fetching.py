"""The answer of a decode leg that fetches its KV from a prefill worker."""

from kvrouter.core.errors import KvrouterError
from kvrouter.core.requests import EngineChunk, FinishReason, KvLoss
from kvrouter.engines.openai.server import EngineFailed, EngineFailedLater
from kvrouter.planes.requests.port import EngineStream

KV_FAILURES = (EngineFailed, EngineFailedLater)


class FetchingStream:
    """Takes an engine that fails such a leg before its first token to have got no KV: it does not say why it
    failed, and that is why most do. The leg is then prefilled again, and nobody is blamed. ``failures`` are
    how it may say so.
    """

    def __init__(self, inner: EngineStream, failures: tuple[type[KvrouterError], ...] = KV_FAILURES) -> None:
        self._inner = inner
        self._failures = failures
        self._has_begun = False

    def __aiter__(self) -> "FetchingStream":
        return self

    async def __anext__(self) -> EngineChunk:
        try:
            chunk = await self._inner.__anext__()
        except self._failures as error:
            if self._has_begun:
                raise
            return EngineChunk(finish=FinishReason.ERROR, error=error.message, kv_lost=KvLoss.BROKEN)
        self._has_begun = True
        return chunk

    def cancel(self, reason: str) -> None:
        """Tell the engine to stop. Idempotent."""
        self._inner.cancel(reason)

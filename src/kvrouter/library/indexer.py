"""Which workers hold a prompt's blocks, without any routing."""

from collections.abc import Sequence
from typing import Self

import numpy as np

from kvrouter.assembly import build_service
from kvrouter.config import KvRouterConfig
from kvrouter.core.errors import ShuttingDown
from kvrouter.core.ids import Slot
from kvrouter.core.requests import TokenBuffer
from kvrouter.library.fleet_of import OfEndpoint, model_of
from kvrouter.library.inputs import token_buffer
from kvrouter.library.runtime import Endpoint


class KvIndexer:
    """Which blocks an endpoint's workers hold, and nothing else. Use it as an async context manager."""

    def __init__(self, endpoint: Endpoint, block_size: int) -> None:
        runtime = endpoint.runtime
        self._service = build_service(
            KvRouterConfig(),
            plane=runtime.requests,
            discovery=OfEndpoint(endpoint, block_size),
            subscriber=runtime.events,
        )
        self._is_open = False

    async def __aenter__(self) -> Self:
        await self._service.start()
        self._is_open = True
        return self

    async def __aexit__(self, *_exc: object) -> None:
        self._is_open = False
        self._service.stop()

    async def find_matches_for_request(
        self, token_ids: TokenBuffer | Sequence[int], *, model: str | None = None
    ) -> dict[int, int]:
        """Return worker id → leading blocks held, the best of its ranks; workers without any are absent.

        Raises :class:`ShuttingDown` outside the indexer's context: it follows nobody there.
        """
        if not self._is_open:
            raise ShuttingDown("this KvIndexer follows no workers: use it inside its `async with`")
        room = model_of(self._service, model)
        overlap = room.cache.overlap(room.hash_prompt(token_buffer(token_ids)), room.fleet.n_slots)
        if overlap is None:
            return {}
        matches: dict[int, int] = {}
        for slot in np.flatnonzero(overlap).tolist():
            rank = room.fleet.rank_at(Slot(slot))
            if rank is not None:
                matches[rank.worker_id] = max(matches.get(rank.worker_id, 0), int(overlap[slot]))
        return matches

"""One rank at customs: its batches, decoded and passed on as the events that routers get."""

import asyncio
from collections.abc import Callable

from kvrouter.core.errors import ProtocolError
from kvrouter.core.events import KvEvent
from kvrouter.core.ids import DpRank
from kvrouter.engines.customs.ledger import RankLedger
from kvrouter.engines.customs.listener import EngineListener, EventsAt
from kvrouter.engines.customs.words import Decode, EngineFacts

EventsSink = Callable[[DpRank, tuple[KvEvent, ...]], None]


class RankCustoms:
    """Follows one rank's publisher; ``on_lost`` hears why something is missing for good.

    A new start of the engine is told by :meth:`begin_anew`: its cache is empty and its batches count from 0.
    """

    def __init__(
        self,
        at: EventsAt,
        decode: Decode,
        facts: EngineFacts,
        *,
        on_events: EventsSink,
        on_lost: Callable[[str], None],
    ) -> None:
        self._at = at
        self._decode = decode
        self._facts = facts
        self._on_events = on_events
        self._on_lost = on_lost
        self._ledger = RankLedger(facts)
        self._listening: asyncio.Task[None] | None = None

    @property
    def is_partial(self) -> bool:
        """Whether events were missed: more blocks may be held than are known."""
        return self._ledger.is_partial

    def start(self) -> None:
        """Begin to listen."""
        listener = EngineListener(
            self._at, on_batch=self._take, on_missed=self._missed, on_refused=self._refused
        )
        self._listening = asyncio.create_task(listener.run())

    def begin_anew(self) -> None:
        """The engine was started anew: nothing of before is held."""
        self.stop()
        self._on_events(self._facts.dp_rank, self._ledger.lose())
        self._ledger = RankLedger(self._facts)
        self.start()

    def stop(self) -> None:
        """Listen no more. Idempotent."""
        if self._listening is not None:
            self._listening.cancel()
            self._listening = None

    def _take(self, payload: bytes) -> None:
        try:
            batches = self._decode(payload)
        except ProtocolError as error:
            self._lose(f"a batch of KV events cannot be read: {error.message}")
            return
        was_partial = self._ledger.is_partial
        for batch in batches:
            events = self._ledger.take(batch.events)
            if events:
                self._on_events(self._facts.dp_rank, events)
        if self._ledger.is_partial is not was_partial:
            self._on_lost(
                "a block's parent is not known" if self._ledger.is_partial else "its cache was cleared"
            )

    def _missed(self, n_batches: int) -> None:
        self._lose(f"{n_batches} batches of KV events are lost for good")

    def _refused(self, error: ProtocolError) -> None:
        self._lose(error.message)

    def _lose(self, why: str) -> None:
        self._on_events(self._facts.dp_rank, self._ledger.lose())
        self._on_lost(why)

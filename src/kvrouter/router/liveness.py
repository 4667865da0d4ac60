"""Worker liveness: subscribes to each worker's events and follows whether it answers requests."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kvrouter.core.errors import ConfigError
from kvrouter.core.ids import WorkerId
from kvrouter.core.workers import WorkerCard
from kvrouter.transports.events.port import EventSubscriber
from kvrouter.transports.requests.port import RequestTransport, WorkerUnreachable

AliveChanged = Callable[[WorkerCard, bool], None]
LapsedAndDead = Callable[[WorkerCard], None]


@dataclass(slots=True)
class _Followed:
    card: WorkerCard
    ends: list[Callable[[], None]]
    is_alive: bool = True
    has_lapsed: bool = False


class Liveness:
    """Follows workers on the request and the event transport.

    A worker that still answers after its lease ran out is kept: an open connection shows that it is alive,
    and discovery itself may be broken. It is removed when it stops answering.
    """

    def __init__(
        self,
        requests: RequestTransport,
        events: EventSubscriber,
        *,
        follows_events: bool,
        on_alive: AliveChanged,
        on_lapsed_and_dead: LapsedAndDead,
    ) -> None:
        self._requests = requests
        self._events = events
        self._follows_events = follows_events
        self._on_alive = on_alive
        self._on_lapsed_and_dead = on_lapsed_and_dead
        self._followed: dict[WorkerId, _Followed] = {}

    def follow(self, card: WorkerCard) -> str | None:
        """Follow a worker, or update its card; return a warning about the card, or None."""
        known = self._followed.get(card.worker_id)
        if known is not None and _same_connection(known.card, card):
            known.card, known.has_lapsed = card, False
            return None
        self.drop(card.worker_id)
        followed = self._followed[card.worker_id] = _Followed(card, [])
        warning: str | None = None
        try:
            followed.ends.append(self._events.follow(card))  # load reports use the same subscription
        except ConfigError as error:
            if self._follows_events and card.publishes_kv_events:
                warning = error.message
        try:
            followed.ends.append(self._requests.follow(card.address, partial(self._answers, followed)))
        except WorkerUnreachable as error:
            warning = f"address: {error.message}: workers and frontends must agree on --request-plane and TLS"
            handle = asyncio.get_running_loop().call_soon(self._answers, followed, False)
            followed.ends.append(handle.cancel)
        return warning

    def drop(self, worker_id: WorkerId) -> None:
        """Stop following the worker; idempotent."""
        followed = self._followed.pop(worker_id, None)
        if followed is not None:
            for end in followed.ends:
                end()

    def lapsed(self, worker_id: WorkerId) -> bool:
        """Note that the worker's lease ran out; return whether it is kept because it answers."""
        followed = self._followed.get(worker_id)
        if followed is None or not followed.is_alive:
            return False
        followed.has_lapsed = True
        return True

    def has_lapsed(self, worker_id: WorkerId) -> bool:
        """Whether the worker is kept although its lease ran out."""
        followed = self._followed.get(worker_id)
        return followed is not None and followed.has_lapsed

    def close(self) -> None:
        """Stop following all workers."""
        for worker_id in tuple(self._followed):
            self.drop(worker_id)

    def _answers(self, followed: _Followed, is_alive: bool) -> None:
        if self._followed.get(followed.card.worker_id) is not followed or followed.is_alive == is_alive:
            return
        followed.is_alive = is_alive
        if not is_alive and followed.has_lapsed:
            self._on_lapsed_and_dead(followed.card)
        else:
            self._on_alive(followed.card, is_alive)


def _same_connection(known: WorkerCard, card: WorkerCard) -> bool:
    return (known.incarnation, known.address, known.event_source, known.publishes_kv_events) == (
        card.incarnation,
        card.address,
        card.event_source,
        card.publishes_kv_events,
    )

"""What a router keeps up for each worker that it knows: an ear for its events, and an eye on its life."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kvrouter.core.errors import ConfigError
from kvrouter.core.ids import WorkerId
from kvrouter.core.workers import WorkerCard
from kvrouter.planes.events.port import EventSubscriber
from kvrouter.planes.requests.port import RequestPlane, WorkerUnreachable

AliveChanged = Callable[[WorkerCard, bool], None]
LapsedAndDead = Callable[[WorkerCard], None]


@dataclass(slots=True)
class _Contact:
    card: WorkerCard
    ends: list[Callable[[], None]]
    is_alive: bool = True
    has_lapsed: bool = False


class Contacts:
    """Follows workers on both planes.

    A worker whose lease has run out and that still answers requests is kept: an open connection is a sign of
    life, and discovery may be what is broken. It is let go when it stops answering.
    """

    def __init__(
        self,
        requests: RequestPlane,
        events: EventSubscriber,
        *,
        hears_events: bool,
        on_alive: AliveChanged,
        on_lapsed_and_dead: LapsedAndDead,
    ) -> None:
        self._requests = requests
        self._events = events
        self._hears_events = hears_events
        self._on_alive = on_alive
        self._on_lapsed_and_dead = on_lapsed_and_dead
        self._contacts: dict[WorkerId, _Contact] = {}

    def follow(self, card: WorkerCard) -> str | None:
        """Follow a worker, or go on with its newer card; return what is odd about it, if anything is."""
        known = self._contacts.get(card.worker_id)
        if known is not None and _same_contact(known.card, card):
            known.card, known.has_lapsed = card, False
            return None
        self.drop(card.worker_id)
        contact = self._contacts[card.worker_id] = _Contact(card, [])
        odd: str | None = None
        try:
            contact.ends.append(self._events.follow(card))  # its load reports come the same way
        except ConfigError as error:
            if self._hears_events and card.publishes_kv_events:
                odd = error.message
        try:
            contact.ends.append(self._requests.follow(card.address, partial(self._answers, contact)))
        except WorkerUnreachable as error:
            odd = f"address: {error.message}: workers and frontends must agree on --request-plane and TLS"
            handle = asyncio.get_running_loop().call_soon(self._answers, contact, False)
            contact.ends.append(handle.cancel)
        return odd

    def drop(self, worker_id: WorkerId) -> None:
        """Follow the worker no longer; idempotent."""
        contact = self._contacts.pop(worker_id, None)
        if contact is not None:
            for end in contact.ends:
                end()

    def lapsed(self, worker_id: WorkerId) -> bool:
        """Discovery's lease on the worker ran out: return whether it is kept, because it answers."""
        contact = self._contacts.get(worker_id)
        if contact is None or not contact.is_alive:
            return False
        contact.has_lapsed = True
        return True

    def has_lapsed(self, worker_id: WorkerId) -> bool:
        """Whether the worker is kept although its lease ran out."""
        contact = self._contacts.get(worker_id)
        return contact is not None and contact.has_lapsed

    def close(self) -> None:
        """Follow nobody any more."""
        for worker_id in tuple(self._contacts):
            self.drop(worker_id)

    def _answers(self, contact: _Contact, is_alive: bool) -> None:
        if self._contacts.get(contact.card.worker_id) is not contact or contact.is_alive == is_alive:
            return
        contact.is_alive = is_alive
        if not is_alive and contact.has_lapsed:
            self._on_lapsed_and_dead(contact.card)
        else:
            self._on_alive(contact.card, is_alive)


def _same_contact(known: WorkerCard, card: WorkerCard) -> bool:
    return (known.incarnation, known.address, known.event_source, known.publishes_kv_events) == (
        card.incarnation,
        card.address,
        card.event_source,
        card.publishes_kv_events,
    )

"""Exchange of link measurements and loads between routers, as messages of replica sync."""

from collections import deque
from collections.abc import Iterator
from typing import Final, Protocol

from msgspec import structs

from kvrouter.core.ids import ModelName, RouterId
from kvrouter.core.replica_messages import LinkUpdate

EARLY_MODELS_MAX: Final = 64
EARLY_UPDATES_MAX: Final = 64
"""The most buffered messages for each model, and the most models, whose workers have not joined yet."""


class LinkSharer(Protocol):
    """The source and receiver of one model's link updates."""

    def take_update(self, router_id: RouterId, *, now_s: float) -> LinkUpdate | None:
        """Return the update since the last call; None when nothing changed."""

    def all_updates(self, router_id: RouterId, *, now_s: float) -> Iterator[LinkUpdate]:
        """Yield all current measurements, the oldest first."""

    def on_link_update(self, update: LinkUpdate, *, now_s: float) -> None:
        """Apply another router's update."""

    def router_gone(self, router_id: RouterId) -> None:
        """Remove the link loads of a router that ended."""


class LinkExchange:
    """Exchanges link updates for all models of one router."""

    def __init__(self, router_id: RouterId) -> None:
        self._router_id = router_id
        self._sharers: dict[ModelName, LinkSharer] = {}
        self._early: dict[ModelName, deque[tuple[float, LinkUpdate]]] = {}
        """Updates by model for models whose workers have not joined yet, as when this router starts."""

    def share(self, model: ModelName, sharer: LinkSharer) -> None:
        """Exchange a model's updates from now on, and apply the buffered ones; replaces an earlier sharer."""
        self._sharers[model] = sharer
        for received_s, update in self._early.pop(model, ()):
            sharer.on_link_update(update, now_s=received_s)

    def forget(self, model: ModelName) -> None:
        """Stop exchanging the model's updates."""
        self._sharers.pop(model, None)

    def take(self, *, now_s: float) -> Iterator[LinkUpdate]:
        """Yield the updates since the last call, for all other routers."""
        for sharer in self._sharers.values():
            update = sharer.take_update(self._router_id, now_s=now_s)
            if update is not None:
                yield update

    def state(self, *, now_s: float) -> Iterator[LinkUpdate]:
        """Yield all current measurements, for a router that asks."""
        for sharer in tuple(self._sharers.values()):
            yield from sharer.all_updates(self._router_id, now_s=now_s)

    def on_link_update(self, update: LinkUpdate, *, now_s: float) -> None:
        """Apply an update; for a model without workers yet, buffer the latest ones."""
        sharer = self._sharers.get(update.model)
        if sharer is not None:
            sharer.on_link_update(update, now_s=now_s)
        elif update.seen and (update.model in self._early or len(self._early) < EARLY_MODELS_MAX):
            kept = structs.replace(update, uses=None)
            self._early.setdefault(update.model, deque(maxlen=EARLY_UPDATES_MAX)).append((now_s, kept))

    def router_gone(self, router_id: RouterId) -> None:
        """Remove a router's link loads from all models."""
        for sharer in self._sharers.values():
            sharer.router_gone(router_id)

"""What routers say to each other of links: between a model's transfers and the messages of replica sync."""

from collections import deque
from collections.abc import Iterator
from typing import Final, Protocol

from msgspec import structs

from kvrouter.core.ids import ModelName, RouterId
from kvrouter.core.sync import LinkNews

EARLY_MODELS_MAX: Final = 64
EARLY_NEWS_MAX: Final = 64
"""So many messages are kept of so many models whose workers did not come yet."""


class LinkSharer(Protocol):
    """Who learns of one model's links."""

    def take_news(self, router_id: RouterId, *, now_s: float) -> LinkNews | None:
        """Return what is new since the last time; None where nothing is."""

    def all_news(self, router_id: RouterId, *, now_s: float) -> Iterator[LinkNews]:
        """Yield all that counts now, the oldest first."""

    def on_news(self, news: LinkNews, *, now_s: float) -> None:
        """Take in what another router says."""

    def router_gone(self, router_id: RouterId) -> None:
        """A router ended, and what it put on links with it."""


class LinkExchange:
    """One router's part, for all of its models."""

    def __init__(self, router_id: RouterId) -> None:
        self._router_id = router_id
        self._sharers: dict[ModelName, LinkSharer] = {}
        self._early: dict[ModelName, deque[tuple[float, LinkNews]]] = {}
        """Of models whose workers did not come yet: a router that starts hears of links first."""

    def share(self, model: ModelName, sharer: LinkSharer) -> None:
        """Share what is learned of a model's links, from what was heard before on; an earlier sharer of it is
        let be.
        """
        self._sharers[model] = sharer
        for heard_s, news in self._early.pop(model, ()):
            sharer.on_news(news, now_s=heard_s)

    def forget(self, model: ModelName) -> None:
        """Share nothing of it any more."""
        self._sharers.pop(model, None)

    def take(self, *, now_s: float) -> Iterator[LinkNews]:
        """Yield what is new, for all other routers."""
        for sharer in self._sharers.values():
            news = sharer.take_news(self._router_id, now_s=now_s)
            if news is not None:
                yield news

    def state(self, *, now_s: float) -> Iterator[LinkNews]:
        """Yield all that is known, for one that asks."""
        for sharer in tuple(self._sharers.values()):
            yield from sharer.all_news(self._router_id, now_s=now_s)

    def on_news(self, news: LinkNews, *, now_s: float) -> None:
        """Take in what came; for a model that is not here yet it is kept, the last of it."""
        sharer = self._sharers.get(news.model)
        if sharer is not None:
            sharer.on_news(news, now_s=now_s)
        elif news.seen and (news.model in self._early or len(self._early) < EARLY_MODELS_MAX):
            kept = structs.replace(news, uses=None)
            self._early.setdefault(news.model, deque(maxlen=EARLY_NEWS_MAX)).append((now_s, kept))

    def router_gone(self, router_id: RouterId) -> None:
        """A router ended."""
        for sharer in self._sharers.values():
            sharer.router_gone(router_id)

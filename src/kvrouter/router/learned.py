"""What a router has learned of links and ranks, also before it was restarted."""

import time
from collections.abc import Callable, Iterable, Iterator

from msgspec import structs

from kvrouter.core.ids import ModelName, RouterId, WorkerRank
from kvrouter.core.replica_messages import LinkUpdate
from kvrouter.core.workers import WorkerCard
from kvrouter.kernel.placement.kept_speeds import RANKS_MAX, KeptRank, KeptSpeeds
from kvrouter.router.model_router import ModelRouter

RECALLED_S = 3600.0
"""What was recalled and is older than this is dropped while its workers have not joined."""


class Learned:
    """The learned speeds of links and ranks of all ``models``, those of absent workers included."""

    def __init__(self, models: Callable[[], Iterable[ModelRouter]]) -> None:
        self._models = models
        self._links: dict[ModelName, list[LinkUpdate]] = {}
        self._speeds: dict[ModelName, KeptSpeeds] = {}
        """Without their ranks."""
        self._ranks: dict[ModelName, dict[WorkerRank, KeptRank]] = {}
        self._saved_s = self._recalled_s = 0.0

    def recall(self, links: Iterable[LinkUpdate], speeds: Iterable[KeptSpeeds], *, aged_s: float) -> None:
        """Give models what was saved ``aged_s`` seconds ago; of links and ranks of workers that have not
        joined it is kept until they do.
        """
        self._recalled_s = time.monotonic()
        self._saved_s = self._recalled_s - aged_s
        for update in links:
            self._links.setdefault(update.model, []).append(update)
        for of_model in speeds:
            self._speeds[of_model.model] = structs.replace(of_model, ranks=())
            self._ranks[of_model.model] = {kept.rank: kept for kept in of_model.ranks}
        for model in self._models():
            for card in model.fleet:
                self.joined(model, card)

    def joined(self, model: ModelRouter, card: WorkerCard) -> None:
        """Give the model what was recalled of a worker that joined it, and of the model. Nothing is recalled
        of an engine that started again since, or of a worker that was away for :data:`RECALLED_S`.
        """
        now_s, aged_s = model.clock(), time.monotonic() - self._saved_s
        running_s = time.monotonic() - self._recalled_s
        for update in self._links.pop(card.model, ()):
            model.placer.transfers.on_link_update(update, now_s=now_s, aged_s=aged_s)
        speeds, ranks = self._speeds.get(card.model), self._ranks.get(card.model, {})
        if speeds is None:
            return
        if speeds.timing != model.placer.learned.timing_digest:
            del self._speeds[card.model], self._ranks[card.model]
            return
        for rank in card.ranks():
            kept, slot = ranks.pop(rank, None), model.fleet.slot_of(rank)
            if kept is None or slot is None or not kept.is_of(card):
                continue
            away_s = aged_s + kept.aged_s if kept.aged_s else running_s
            if away_s <= RECALLED_S:
                model.placer.speeds.recall(speeds, slot, kept, aged_s=aged_s + kept.aged_s, now_s=now_s)

    def links(self, router_id: RouterId) -> Iterator[LinkUpdate]:
        """Yield the current link speeds of every model; recalled ones of models without workers are included
        for :data:`RECALLED_S`.
        """
        for model in self._models():
            yield from model.placer.transfers.all_updates(router_id, now_s=model.clock())
        aged_s = time.monotonic() - self._saved_s
        for recalled in self._links.values():
            for update in recalled:
                aged = [structs.replace(each, age_s=each.age_s + aged_s) for each in update.seen]
                kept = tuple(each for each in aged if each.age_s <= RECALLED_S)
                if kept:
                    yield structs.replace(update, seen=kept)

    def speeds(self) -> Iterator[KeptSpeeds]:
        """Yield the current speeds of every model's ranks; recalled ones of absent workers are included for
        :data:`RECALLED_S`.
        """
        current = {
            model.fleet.model: model.placer.learned.kept_speeds(now_s=model.clock())
            for model in self._models()
        }
        aged_s = time.monotonic() - self._saved_s
        for name in current.keys() | self._speeds.keys():
            absent = [
                structs.replace(kept, aged_s=kept.aged_s + aged_s)
                for kept in self._ranks.get(name, {}).values()
                if kept.aged_s + aged_s <= RECALLED_S
            ]
            known = current.get(name)
            shared = self._speeds.get(name, known) if known is None or not known.ranks else known
            ranks = (*(() if known is None else known.ranks), *absent)[:RANKS_MAX]
            if shared is not None and ranks:
                yield structs.replace(shared, ranks=ranks)

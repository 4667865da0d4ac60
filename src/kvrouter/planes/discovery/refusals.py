"""What is in a store's place for cards and holds none: told once, not at every look."""

from kvrouter.planes.discovery.leases import TroubleSink

REFUSALS_MAX = 1024
"""How many places that hold no card are told; of as many that hold one again it is known since when."""


class Refusals:
    """Tells of places that hold no card, each once until it holds one, however many watches see it.

    Where versions of a store have an order, they are given: a watch that is behind another says nothing new.
    """

    def __init__(self, on_refused: TroubleSink) -> None:
        self._on_refused = on_refused
        self._told: dict[str, int | None] = {}
        self._held: dict[str, int] = {}

    def tell(self, key: str, what: str, why: str, *, version: int | None = None) -> None:
        """``key`` holds no card as of ``version``."""
        if version is not None and version < self._held.get(key, 0):
            return
        if key in self._told:
            self._told[key] = _later(version, self._told[key])
        elif len(self._told) < REFUSALS_MAX:
            self._told[key] = version
            self._on_refused(what, why)

    def forget(self, key: str, *, version: int | None = None) -> None:
        """``key`` holds a card as of ``version``, or is gone."""
        if key not in self._told:
            return
        told = self._told[key]
        if version is None or told is None or version > told:
            del self._told[key]
            if version is not None:
                self._hold(key, version)

    def _hold(self, key: str, version: int) -> None:
        self._held.pop(key, None)
        self._held[key] = version
        if len(self._held) > REFUSALS_MAX:
            del self._held[next(iter(self._held))]


def _later(one: int | None, other: int | None) -> int | None:
    return one if other is None or (one is not None and one > other) else other

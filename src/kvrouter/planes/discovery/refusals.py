"""What is in a store's place for cards and holds none: told once, not at every look."""

from kvrouter.planes.discovery.leases import TroubleSink

REFUSALS_MAX = 1024
"""How many places that hold no card are told."""


class Refusals:
    """Tells of places that hold no card, each once until it holds one, however many watches see it."""

    def __init__(self, on_refused: TroubleSink) -> None:
        self._on_refused = on_refused
        self._told: dict[str, int] = {}

    def tell(self, key: str, what: str, why: str, *, version: int = 0) -> None:
        """``key`` holds no card as of ``version``, where versions of a store have an order."""
        if key in self._told:
            self._told[key] = max(version, self._told[key])
        elif len(self._told) < REFUSALS_MAX:
            self._told[key] = version
            self._on_refused(what, why)

    def forget(self, key: str, *, version: int = 1) -> None:
        """``key`` holds a card, or is gone; a watch that is behind says nothing about what was told since."""
        if version > self._told.get(key, version):
            del self._told[key]

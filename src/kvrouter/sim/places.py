"""Where the workers of a replay are, and what KV between two of them is: bytes, domains, money."""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from kvrouter.config.fleet import FleetFile
from kvrouter.config.fleet_workers import link_level, link_table, mock_engine, numbered_workers
from kvrouter.core.ids import WorkerId


class Moved(NamedTuple):
    """One token's KV from one worker to another: their domains, its bytes, and what it costs over their link,
    None where that has no price.
    """

    src: str
    dst: str
    bytes: int
    cost: float | None

    @property
    def crosses(self) -> bool:
        """Whether it goes from one domain to another."""
        return self.src != self.dst


class Places:
    """The workers of a fleet file by their domains of ``level``: by default that which transfers are reported
    by. The price of a transfer is that of the link which decisions weigh, whatever the level.
    """

    def __init__(self, file: FleetFile, level: str | None = None) -> None:
        self.level = level or link_level(file) or ""
        self._groups = dict(numbered_workers(file))
        self._levels = file.topology.levels
        self._links = link_table(file)
        self.moved: Callable[[WorkerId, WorkerId], Moved] = lru_cache(maxsize=None)(self._moved)

    @property
    def has_prices(self) -> bool:
        """Whether any link has a price."""
        links = (self._links.otherwise, *self._links.by_level.values(), *self._links.pairs.values())
        return any(link.price_per_gb is not None for link in links)

    def _moved(self, prefill: WorkerId, decode: WorkerId) -> Moved:
        src, dst = self._groups[prefill], self._groups[decode]
        kv_bytes = mock_engine(src).kv_bytes_per_token
        link = self._links.link(src.domains, dst.domains, self._levels)
        return Moved(
            src.domains.get(self.level, ""), dst.domains.get(self.level, ""), kv_bytes, link.cost(kv_bytes)
        )

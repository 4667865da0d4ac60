"""KV that moved during a replay, by a fleet file: from which domain to which, and at what price."""

from typing import NamedTuple

from kvrouter.fleetfile.fleet_file import FleetFile
from kvrouter.fleetfile.fleet_workers import link_level, link_table
from kvrouter.sim.replay.outcome import Move


class Moved(NamedTuple):
    """The domains that KV went between, and its price over that link, None without a price."""

    src: str
    dst: str
    cost: float | None

    @property
    def crosses(self) -> bool:
        """Whether it went from one domain to another."""
        return self.src != self.dst


class Places:
    """The domains of one ``level`` of a fleet file, and its links. By default it is the level of transfer
    reports.

    The price of a transfer is that of the link that decisions weigh, whatever the level.
    """

    def __init__(self, file: FleetFile, level: str | None = None) -> None:
        self.level = level or link_level(file) or ""
        self._levels = file.topology.levels
        self._links = link_table(file)

    @property
    def has_prices(self) -> bool:
        """Whether any link has a price."""
        links = (self._links.otherwise, *self._links.by_level.values(), *self._links.pairs.values())
        return any(link.price_per_gb is not None for link in links)

    def moved(self, move: Move) -> Moved:
        """Return the domains and the price of a move."""
        cost = self._links.link(move.src, move.dst, self._levels).cost(move.bytes)
        return Moved(move.src.get(self.level, ""), move.dst.get(self.level, ""), cost)

"""What KV transfers of a replay cost, by the prices of the fleet file's links."""

from kvrouter.config.fleet import FleetFile
from kvrouter.config.fleet_workers import mock_links
from kvrouter.mock import DomainPair, Links


class Prices:
    """The prices of the links that mock transfers share."""

    def __init__(self, links: Links) -> None:
        self._links = links

    def cost(self, pair: DomainPair, kv_bytes: int) -> float | None:
        """What ``kv_bytes`` between two domains cost; None where that link has no price."""
        return self._links.between(pair.src_domain, pair.dst_domain).cost(kv_bytes)


def prices_of(file: FleetFile) -> Prices | None:
    """Return the prices of a fleet's links; None where not a single link of the file has one."""
    table = file.topology.link_table
    links = (*table.within.values(), table.across, *table.pairs)
    return Prices(mock_links(file)) if any(link.price_per_gb is not None for link in links) else None

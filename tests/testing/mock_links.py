"""Links between zones, and places in them."""

from collections.abc import Mapping

from kvrouter.core.ids import WorkerId
from kvrouter.engines.mock_engine.mock_links import Links, Place
from kvrouter.kernel.topology.link_table import ACROSS_LINK, SAME_LEVEL_LINK, Link, LinkTable


def zone_links(
    *,
    same: Link = SAME_LEVEL_LINK,
    cross: Link = ACROSS_LINK,
    pairs: Mapping[tuple[str, str], Link] | None = None,
) -> Links:
    """Links inside a zone and between two; ``pairs`` holds two zones in either order, and wins."""
    measured = {("zone", one, other): link for (one, other), link in (pairs or {}).items()}
    table = LinkTable(by_level={"zone": same}, otherwise=cross, pairs=measured)
    return Links(table=table, levels=("zone",), report_level="zone")


def zone(name: str, worker_id: int = 0) -> Place:
    """A worker in a zone."""
    return Place({"zone": name}, WorkerId(worker_id))

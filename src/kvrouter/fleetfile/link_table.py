"""The links of ``router_links``: a table in the setting itself, or in a file that it names."""

from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from kvrouter.core.constraints import RouterMode
from kvrouter.core.cost_rules import BLOCKS
from kvrouter.core.errors import ConfigError
from kvrouter.fleetfile.fleet_file import LinksSpec
from kvrouter.fleetfile.fleet_workers import table_of_links
from kvrouter.kernel.topology.link_table import LinkTable
from kvrouter.settings.problems import Document, config_error, parse_document, problem_of, read_document
from kvrouter.settings.router_settings import KvRouterConfig

FIELD = "router_links"

Links = TypeVar("Links", LinkTable, LinkTable | None)


def file_of_links(given: str) -> Path | None:
    """Return the file that the setting names; None where it holds the table itself."""
    text = given.strip()
    return None if text.startswith("{") else Path(text)


def read_links(given: str) -> LinkTable:
    """Return the table that the setting gives. Raises ConfigError that names the setting, and the field in
    the table.
    """
    file = file_of_links(given)
    try:
        return _table(parse_document(given, FIELD) if file is None else read_document(file))
    except ConfigError as error:
        message = error.message if file is None else f"{FIELD}: {error.message}"
        raise ConfigError(message, param=FIELD) from error


def link_warnings(config: KvRouterConfig, of_file: LinkTable | None) -> list[str]:
    """Return probable mistakes in a router's link settings; ``of_file`` are the links of its fleet file.
    Raises ConfigError for an invalid ``router_links``.
    """
    links = links_of_router(config, of_file)
    if links is None or links.is_assumed:
        has_weight = config.kv_transfer_weight > 0.0
        message = "router.kv_transfer_weight has no effect without links: give router.router_links"
        return [message] if has_weight else []
    return [] if config.kv_transfer_topology_level is not None else unbound_blocks(config, links)


def links_of_router(config: KvRouterConfig, of_file: Links) -> LinkTable | Links:
    """Return the links of ``router_links``, else those of the fleet file. Raises ConfigError for an invalid
    ``router_links``.
    """
    return of_file if config.router_links is None else read_links(config.router_links)


def unbound_blocks(config: KvRouterConfig, of_file: LinkTable) -> list[str]:
    """Return a warning where the cost of blocks picks pairs over links that differ, and no weight counts
    them: without a transfer policy it sends KV over the slowest link as readily as over the fastest. Raises
    ConfigError for a ``router_links`` that cannot be read.
    """
    is_blind = config.cost == BLOCKS and config.kv_transfer_weight == 0.0
    if not is_blind or config.router_mode is not RouterMode.KV:
        return []
    if not links_of_router(config, of_file).has_unlike_links:
        return []
    return [
        "router.router_cost 'blocks' does not see that links differ: unless a transfer policy binds KV, "
        "pairs are picked over the slowest links too; use router_cost time, give router.kv_transfer_weight, "
        "or set a transfer policy"
    ]


def _table(document: Document) -> LinkTable:
    try:
        return table_of_links(LinksSpec.model_validate(document.content))
    except ValidationError as error:
        problems = [problem_of(item, LinksSpec) for item in error.errors()]
        raise config_error(problems, document.place) from error

"""The links of ``router_links``: a table in the setting itself, or in a file that it names."""

from pathlib import Path

from pydantic import ValidationError

from kvrouter.config.fleet import LinksSpec
from kvrouter.config.fleet_workers import table_of_links
from kvrouter.config.problems import Document, config_error, parse_document, problem_of, read_document
from kvrouter.config.router import KvRouterConfig
from kvrouter.core.errors import ConfigError
from kvrouter.topology import LinkTable

FIELD = "router_links"


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


def unweighed_links(config: KvRouterConfig, of_file: LinkTable | None) -> tuple[str, ...]:
    """Return a warning where links have a weight, and there are none."""
    if config.kv_transfer_weight == 0.0 or config.router_links is not None or of_file is not None:
        return ()
    return ("router.kv_transfer_weight has no effect without links: give router.router_links",)


def _table(document: Document) -> LinkTable:
    try:
        return table_of_links(LinksSpec.model_validate(document.content))
    except ValidationError as error:
        problems = [problem_of(item, LinksSpec) for item in error.errors()]
        raise config_error(problems, document.place) from error

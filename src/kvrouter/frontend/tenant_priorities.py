"""The table of ``--tenant-priorities``, whose rows have the form that requests state."""

from pathlib import Path

from kvrouter.core.errors import ConfigError
from kvrouter.core.json import Unreadable, converted
from kvrouter.frontend.openai.body import AgentHints
from kvrouter.settings.problems import Document, parse_document, read_document


def read_tenants(given: str) -> dict[str, AgentHints]:
    """Return the priorities of each tenant, from JSON or from the file of that path. Raises ConfigError that
    names the setting and the tenant.
    """
    field, text = "tenant_priorities", given.strip()
    is_file = not text.startswith("{")
    try:
        document = read_document(Path(text)) if is_file else parse_document(text, field)
        return {tenant: _hints_of(document, tenant) for tenant in document.content}
    except ConfigError as error:
        message = f"{field}: {error.message}" if is_file else error.message
        raise ConfigError(message, param=field) from error


def _hints_of(document: Document, tenant: object) -> AgentHints:
    if not isinstance(tenant, str):
        raise ConfigError(f"{document.name}: {tenant!r} is no text: write the tenant in quotes")
    try:
        return converted(document.content[tenant], AgentHints)
    except Unreadable as error:
        raise ConfigError(f"{document.place((tenant,))}: {error}") from error

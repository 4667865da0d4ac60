"""One worker described by flags or by arguments, with the checks of the fleet file."""

import secrets
from collections.abc import Callable, Mapping, Sequence

from kvrouter.core.errors import ConfigError
from kvrouter.core.ids import DRAWN_WORKER_IDS, WORKER_IDS, WorkerId
from kvrouter.fleetfile.fleet_checks import load_part
from kvrouter.fleetfile.fleet_file import FleetFile
from kvrouter.fleetfile.worker_options import FILE_PATHS
from kvrouter.settings.problems import Document, Path, dotted

ENGINE_PATHS: Mapping[str, Path] = {
    "kind": ("workers", 0, "engine", "kind"),
    "url": ("workers", 0, "engine", "url"),
    "role": ("workers", 0, "role"),
    "model": ("models", 0, "name"),
    "block_size": ("models", 0, "block_size"),
    "context_length": ("models", 0, "context_length"),
    "dp_size": ("workers", 0, "dp_size"),
    "kv_events": ("workers", 0, "engine", "kv_events"),
    "kv_events_endpoint": ("workers", 0, "engine", "kv_events_endpoint"),
    "kv_events_replay_endpoint": ("workers", 0, "engine", "kv_events_replay_endpoint"),
}
"""The path in a fleet file of what a program says of an engine that runs already."""


class _FieldDocument(Document):
    """A fleet file without a text: a mistake is located by ``shown(name)``, where ``paths`` has the name."""

    def __init__(
        self, content: Mapping[str, object], paths: Mapping[str, Path], shown: Callable[[str], str]
    ) -> None:
        super().__init__("", content, {})
        self._paths = paths
        self._shown = shown

    def place(self, path: Path) -> str:
        """Return the flag or the argument that the value came from."""
        for name, at in self._paths.items():
            if path[: len(at)] == at or (path and at[: len(path)] == path):
                return self._shown(name)
        return dotted(path)


def flag_of(name: str) -> str:
    """Return the flag of a name in :data:`FILE_PATHS`."""
    return f"--{name.replace('_', '-')}"


def fleet_of_one(given: Mapping[str, object]) -> FleetFile:
    """Return a fleet file with the one worker that the flags describe; raise ConfigError that names the flag.

    ``given`` has the values of the given flags, by the names of :data:`FILE_PATHS`; ``domain`` is a sequence
    of ``level=value``, the broadest level first, and ``kv_format`` one of ``part=value``.
    """
    content: dict[str, object] = {
        "version": 1,
        "models": [{"name": "mock"}],
        "workers": [{"name": "worker", "engine": {}}],
    }
    pairs = {name: _pairs(name, given[name]) for name in _PAIRS if name in given}
    if "domain" in pairs:
        content["topology"] = {"levels": list(pairs["domain"])}
    for name, value in given.items():
        put(content, FILE_PATHS[name], pairs.get(name, value))
    return load_part(_FieldDocument(content, FILE_PATHS, flag_of))


def fleet_of_engine(given: Mapping[str, object]) -> FleetFile:
    """Return a fleet file with the one engine that runs already and that ``given`` describes, by the names of
    :data:`ENGINE_PATHS`; raise ConfigError that names the argument.
    """
    content: dict[str, object] = {
        "version": 1,
        "models": [{}],
        "workers": [{"name": "engine", "engine": {}}],
    }
    for name, value in given.items():
        put(content, ENGINE_PATHS[name], value)
    try:
        return load_part(_FieldDocument(content, ENGINE_PATHS, str))
    except ConfigError as error:  # its message begins with the first argument at fault
        raise ConfigError(error.message, param=error.message.partition(":")[0]) from None


def worker_id_of(given: int | None) -> WorkerId:
    """Return the id that ``--worker-id`` gives, else one that is drawn. Raises ConfigError."""
    if given is None:
        return WorkerId(secrets.randbelow(DRAWN_WORKER_IDS))
    if not 0 <= given < WORKER_IDS:
        raise ConfigError(f"--worker-id: must be in 0..2**63-1, not {given}", param="worker_id")
    return WorkerId(given)


_PAIRS = {"domain": "level=value, as zone=a", "kv_format": "part=value, as version=0.32.0"}


def _pairs(name: str, texts: object) -> dict[str, str]:
    """Return the values of a flag that is repeated as ``name=value``."""
    found: dict[str, str] = {}
    for text in texts if isinstance(texts, Sequence) else ():
        key, equals, value = str(text).partition("=")
        if not equals or not value.strip():
            raise ConfigError(f"{flag_of(name)}: must be {_PAIRS[name]}, not {text!r}", param=name)
        if key in found:
            raise ConfigError(f"{flag_of(name)}: {key} is given twice", param=name)
        found[key] = value
    return found


def put(content: dict[str, object], path: Path, value: object) -> None:
    """Write ``value`` into a document; missing parents become mappings."""
    here: object = content
    for part in path[:-1]:
        if isinstance(here, list) and isinstance(part, int):
            here = here[part]
        elif isinstance(here, dict):
            here = here.setdefault(part, {})
    if isinstance(here, dict):
        here[path[-1]] = value

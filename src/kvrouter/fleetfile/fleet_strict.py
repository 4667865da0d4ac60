"""Stricter checks of a fleet file: valid settings that are hardly meant, with their place."""

from collections.abc import Iterator
from urllib.parse import urlsplit

from kvrouter.fleetfile.fleet_checks import url_path
from kvrouter.fleetfile.fleet_engines import AttachedEngineSpec
from kvrouter.fleetfile.fleet_file import FleetFile
from kvrouter.settings.problems import Path, Problem, dotted

_LOCAL_HOSTS = frozenset(("localhost", "127.0.0.1", "::1"))
_PORTS = {"http": 80, "https": 443}


def strict_problems(fleet: FleetFile) -> Iterator[Problem]:
    """Yield what ``kvrouter fleet check --strict`` counts as a mistake besides the warnings.

    The names in the file must be good: see :func:`~kvrouter.fleetfile.fleet_checks.examine_fleet`.
    """
    yield from _level_problems(fleet)
    yield from _link_problems(fleet)
    yield from _address_problems(fleet)
    yield from _placeholder_problems(fleet)


def _level_problems(fleet: FleetFile) -> Iterator[Problem]:
    """Yield levels without a worker that has a value, and workers without a value that others have."""
    if any(group.topology_env for group in fleet.workers):
        return  # which values there are, those workers' files say
    for position, level in enumerate(fleet.topology.levels):
        if not any(level in group.domains for group in fleet.workers):
            must = f"no worker has a {level}: write it into domains of the groups, or leave the level out"
            yield Problem(("topology", "levels", position), must)
            continue
        for number, group in enumerate(fleet.workers):
            if level not in group.domains:
                must = f"has no {level}, which other groups have: KV to or from it is taken for far"
                yield Problem(("workers", number, "domains"), must)


def _link_problems(fleet: FleetFile) -> Iterator[Problem]:
    """Measured links of places where no worker is."""
    if any(group.topology_env for group in fleet.workers):
        return
    for number, pair in enumerate(fleet.topology.link_table.pairs):
        values = {group.domains[pair.level] for group in fleet.workers if pair.level in group.domains}
        for end, value in enumerate(pair.between):
            if value not in values:
                there = ", ".join(sorted(values)) or "none"
                must = f"no worker is in {pair.level} {value!r}: there are {there}"
                yield Problem(("topology", "links", "pairs", number, "between", end), must)


def _address_problems(fleet: FleetFile) -> Iterator[Problem]:
    """Addresses of engines that are one, though they are spelled differently."""
    first_at: dict[tuple[str, str, int | None], Path] = {}
    for address, at in _addresses(fleet):
        place = _place_of(address)
        if place in first_at:
            yield Problem(at, f"must be unique: {address} is the address of {dotted(first_at[place])}")
        first_at.setdefault(place, at)


def _placeholder_problems(fleet: FleetFile) -> Iterator[Problem]:
    """Addresses of engines whose host is a name that examples have."""
    for address, at in _addresses(fleet):
        host = urlsplit(address).hostname or ""
        if is_placeholder(host):
            yield Problem(at, f"must have the engine's host: {host!r} is a placeholder")


def is_placeholder(host: str) -> bool:
    """Whether a host is named as in examples, which no engine is."""
    name = host.rstrip(".").replace("_", "-")
    return (
        name in _PLACEHOLDERS
        or name.startswith(("your-", "changeme", "change-me"))
        or name.rpartition(".")[2] in _RESERVED
        or any(name == domain or name.endswith(f".{domain}") for domain in _EXAMPLE_DOMAINS)
    )


_PLACEHOLDERS = frozenset(("host", "hostname", "ip", "todo", "fixme", "tbd", "xxx", "placeholder"))
_RESERVED = frozenset(("example", "invalid"))
_EXAMPLE_DOMAINS = ("example.com", "example.net", "example.org")
"""Names that RFC 2606 reserves for examples."""


def _addresses(fleet: FleetFile) -> Iterator[tuple[str, Path]]:
    """Yield each address of an engine that runs already, with its path."""
    for position, group in enumerate(fleet.workers):
        engine = group.engine
        if not isinstance(engine, AttachedEngineSpec):
            continue
        for number, url in enumerate(engine.all_urls):
            yield url, url_path(position, engine, number)
        for key in ("kv_events_endpoint", "kv_events_replay_endpoint"):
            endpoint = getattr(engine, key)
            if endpoint is not None:
                yield endpoint, ("workers", position, "engine", key)


def _place_of(address: str) -> tuple[str, str, int | None]:
    """Return the target of an address: two spellings of one are equal."""
    parts = urlsplit(address)
    host = (parts.hostname or "").rstrip(".")
    port = parts.port or _PORTS.get(parts.scheme)
    return parts.path.rstrip("/"), "localhost" if host in _LOCAL_HOSTS else host, port

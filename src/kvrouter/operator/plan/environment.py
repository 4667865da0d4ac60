"""Variables of containers: those that the operator owns, and those that it only offers."""

from collections.abc import Collection, Sequence

from pydantic import JsonValue

from kvrouter.config.problems import Path, Problem
from kvrouter.config.variables import spellings
from kvrouter.operator.plan.manifest import Manifest, listed, objects

TOPOLOGY_ENABLED = "DYN_TOPOLOGY_ENABLED"
TOPOLOGY_MOUNT_PATH = "DYN_TOPOLOGY_MOUNT_PATH"
TOPOLOGY_LEVELS = "DYN_TOPOLOGY_LEVELS"
TRANSFER_DOMAIN = "DYN_KV_TRANSFER_DOMAIN"
TRANSFER_ENFORCEMENT = "DYN_KV_TRANSFER_ENFORCEMENT"
TRANSFER_WEIGHT = "DYN_KV_TRANSFER_PREFERRED_WEIGHT"
ROUTER_LEVEL = "DYN_ROUTER_KV_TRANSFER_TOPOLOGY_LEVEL"
ROUTER_MISMATCH = "DYN_ROUTER_KV_TRANSFER_MISMATCH_POLICY"
ROUTER_MODE = "DYN_ROUTER_MODE"

OWNED_ON_WORKERS = frozenset(
    {
        TOPOLOGY_ENABLED,
        TOPOLOGY_MOUNT_PATH,
        TOPOLOGY_LEVELS,
        TRANSFER_DOMAIN,
        TRANSFER_ENFORCEMENT,
        TRANSFER_WEIGHT,
        ROUTER_LEVEL,
        ROUTER_MISMATCH,
    }
)
OWNED_ON_FRONTENDS = frozenset({ROUTER_MODE, ROUTER_LEVEL, ROUTER_MISMATCH})


def variable(name: str, value: str) -> Manifest:
    """Return one entry of ``env``."""
    return {"name": name, "value": value}


def value_of(container: Manifest, name: str) -> str | None:
    """Return the value that ``container`` states for a variable; None where it states none itself."""
    entry = entry_of(container, name)
    value = None if entry is None else entry.get("value")
    return value if isinstance(value, str) else None


def entry_of(container: Manifest, name: str) -> Manifest | None:
    """Return the entry of ``env`` that counts for a variable, under whichever of its names; None for none."""
    found = [entry for entry in objects(container.get("env")) if _is_one(entry.get("name"), name)]
    return found[-1] if found else None


def offered(container: Manifest, entries: Sequence[Manifest]) -> Manifest:
    """Return ``container`` with those of ``entries`` that it has no word of its own for, after its own."""
    own = objects(container.get("env"))
    added = [entry for entry in entries if entry_of(container, str(entry["name"])) is None]
    return {**container, "env": listed([*own, *added])} if added else container


def owned(
    container: Manifest, entries: Sequence[Manifest], names: Collection[str], at: Path
) -> tuple[Manifest, list[Problem]]:
    """Return ``container`` with ``entries`` and no other word on ``names``, and a warning for each that was.

    Ours come first, so that a user's own variables may refer to them.
    """
    ours: dict[JsonValue, Manifest] = {entry["name"]: entry for entry in entries}
    taken: dict[JsonValue, str] = {spelling: name for name in names for spelling in spellings(name)}
    own = objects(container.get("env"))
    warnings = [
        Problem((*at, "env", index), _overwritten(str(entry.get("name")), ours.get(taken[entry.get("name")])))
        for index, entry in enumerate(own)
        if entry.get("name") in taken and entry != ours.get(entry.get("name"))
    ]
    kept = [entry for entry in own if entry.get("name") not in taken]
    return {**container, "env": listed([*entries, *kept])}, warnings


def _is_one(name: JsonValue, other: str) -> bool:
    """Whether two names are those of one variable."""
    return name == other or (isinstance(name, str) and (name in spellings(other) or other in spellings(name)))


def _overwritten(name: str, ours: Manifest | None) -> str:
    becomes = "is left out" if ours is None else f"becomes {ours['value']!r}"
    return f"{name} follows from the policy of KV transfers, and {becomes}: remove it here"

"""A manifest as plain JSON, and careful reading of what users wrote into one."""

from collections.abc import Mapping, Sequence

from pydantic import JsonValue

Manifest = dict[str, JsonValue]


def mapping(found: JsonValue) -> Manifest:
    """Return ``found`` where it is an object, else an empty one."""
    return {**found} if isinstance(found, dict) else {}


def objects(found: JsonValue) -> list[Manifest]:
    """Return a copy of the objects in ``found`` where it is a list, else none."""
    return [{**entry} for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []


def listed(entries: Sequence[Manifest]) -> list[JsonValue]:
    """Return ``entries`` as a value of a manifest."""
    return [*entries]


def strings(found: Mapping[str, str]) -> Manifest:
    """Return ``found`` as a value of a manifest."""
    return {**found}


def without_nothing(manifest: Manifest) -> Manifest:
    """Return ``manifest`` without the fields that are empty lists or objects."""
    return {key: value for key, value in manifest.items() if value not in ([], {})}

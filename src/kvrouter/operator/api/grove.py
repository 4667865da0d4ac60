"""Grove's topology kinds, as they are read: the older spelling (``labelKey``) and the newer one (``key``)."""

from collections.abc import Mapping
from typing import NamedTuple

from kvrouter.operator.api.names import label_key_problem, level_problem

GROVE_GROUP = "grove.io"
GROVE_VERSION = "v1alpha1"
GROVE_PLURALS = {
    "ClusterTopologyBinding": "clustertopologybindings",
    "ClusterTopology": "clustertopologies",
}
"""The kinds and where the API server has them; of two objects of one name, the first kind's is taken."""


KEY_CHARS_REPORTED = 80


class Level(NamedTuple):
    """One level of a topology: its domain, and the node label that holds a node's value of it."""

    domain: str
    label_key: str


class ClusterTopology(NamedTuple):
    """A cluster's topology: its levels, broadest first, and what of it cannot be used, one line each."""

    name: str
    levels: tuple[Level, ...]
    kind: str = "ClusterTopologyBinding"
    oddities: tuple[str, ...] = ()

    @property
    def domains(self) -> tuple[str, ...]:
        """The domains, broadest first."""
        return tuple(level.domain for level in self.levels)

    def label_key(self, domain: str) -> str | None:
        """Return the node label of ``domain``; None when it is no level."""
        return dict(self.levels).get(domain)


def read_topology(found: object) -> ClusterTopology | None:
    """Return the topology that one of Grove's objects describes; None for what isn't one.

    Other people write it, so nothing in it is trusted: a level that cannot be used is left out, and why is
    among the oddities.
    """
    document = _mapping(found)
    name = _text(_mapping(document.get("metadata")).get("name"))
    if not name:
        return None
    kind = _text(document.get("kind")) or "ClusterTopologyBinding"
    listed = _mapping(document.get("spec")).get("levels")
    levels: dict[str, Level] = {}
    oddities: list[str] = []
    for number, entry in enumerate(listed if isinstance(listed, list) else []):
        fields = _mapping(entry)
        domain = _text(fields.get("domain"))
        key = _text(fields.get("key")) or _text(fields.get("labelKey"))
        problem = _level_problem(domain, key, levels)
        if problem is None:
            levels[domain] = Level(domain, key)
        else:
            oddities.append(f"{kind} {name}: spec.levels[{number}]: {problem}")
    return ClusterTopology(name, tuple(levels.values()), kind, tuple(oddities))


def _level_problem(domain: str, key: str, levels: Mapping[str, Level]) -> str | None:
    if not domain or not key:
        return "needs a domain and the key of a node label (key or labelKey)"
    problem = level_problem(domain)
    if problem is not None:
        return f"domain {domain!r} {problem}"
    problem = label_key_problem(key)
    if problem is not None:
        return f"domain {domain!r}: its key {key[:KEY_CHARS_REPORTED]!r} {problem}"
    return f"domain {domain!r} is there twice" if domain in levels else None


def _mapping(found: object) -> Mapping[str, object]:
    return found if isinstance(found, dict) else {}


def _text(found: object) -> str:
    return found.strip() if isinstance(found, str) else ""

"""Cordons: named rules that keep new requests away from workers."""

from collections.abc import Iterable, Mapping
from enum import StrEnum
from hashlib import sha256

import msgspec

from kvrouter.core.errors import InvalidRequest
from kvrouter.core.ids import WORKER_IDS
from kvrouter.core.workers import WorkerCard

WORKER_LEVEL = "worker"
"""The level whose names are worker ids."""

CLUSTER_LEVEL = "cluster"
"""The domain whose value is the name of a worker's cluster, where a router serves several."""

NODE_LEVEL = "node"
"""The level whose names are nodes: a card's ``node``, or its value of the domain ``node`` or ``host``."""

_NODE_DOMAINS = (NODE_LEVEL, "host")

CORDONS_MAX = 1024
"""The most cordons of one namespace."""

CORDON_NAME_CHARS_MAX = 256
"""The longest ``level``, ``name``, ``cluster`` or ``by`` of a cordon."""

CORDON_REASON_CHARS_MAX = 1024
"""The longest reason of a cordon."""

LAST_SECOND = 253402300799.0
"""The end of the year 9999, in Unix time: the last second that a date can express."""

_DIGEST_CHARS = 32


class CordonSource(StrEnum):
    """The origin of a cordon: an API call, or an annotation that the operator read on a node."""

    CALL = "call"
    NODE_ANNOTATION = "node_annotation"


class Cordon(msgspec.Struct, frozen=True, omit_defaults=True):
    """A rule: workers with this ``name`` at this ``level``, present or future, get no new requests.

    ``at_s`` is its creation time in seconds of Unix time; 0 when unknown. A cordon with a ``cluster`` holds
    for the workers of that cluster alone.
    """

    level: str
    name: str
    at_s: float = 0.0
    by: str = ""
    reason: str = ""
    source: CordonSource = CordonSource.CALL
    cluster: str = ""

    @property
    def place(self) -> str:
        """The level and name as text, such as ``zone a``."""
        return f"{self.level} {self.name}"


def cordon_digest(level: str, name: str, source: CordonSource) -> str:
    """Return a cordon's key in a store: the same for every cordon of the same level, name and source."""
    return sha256("\0".join((level, name, source.value)).encode()).hexdigest()[:_DIGEST_CHARS]


def checked_cordon(cordon: Cordon) -> Cordon:
    """Validate a cordon and return its normalized form. Raises InvalidRequest that names the field."""
    for field, text, chars_max in (
        ("level", cordon.level, CORDON_NAME_CHARS_MAX),
        ("name", cordon.name, CORDON_NAME_CHARS_MAX),
        ("cluster", cordon.cluster, CORDON_NAME_CHARS_MAX),
        ("by", cordon.by, CORDON_NAME_CHARS_MAX),
        ("reason", cordon.reason, CORDON_REASON_CHARS_MAX),
    ):
        if len(text) > chars_max:
            raise InvalidRequest(f"{field}: at most {chars_max} characters, not {len(text)}", param=field)
        if not text.isprintable():
            raise InvalidRequest(f"{field}: must be printable, and one line", param=field)
        if field in ("level", "name") and (not text or text != text.strip()):
            raise InvalidRequest(
                f"{field}: must not be empty, nor begin or end with a space, not {text!r}", param=field
            )
    if not 0.0 <= cordon.at_s <= LAST_SECOND:
        raise InvalidRequest(f"at_s: must be seconds of Unix time, not {cordon.at_s:g}", param="at_s")
    if cordon.level != WORKER_LEVEL:
        return cordon
    name = cordon.name
    if not (name.isascii() and name.isdecimal() and len(name) <= 19 and int(name) < WORKER_IDS):
        raise InvalidRequest(f"name: a worker's id is a number below 2**63, not {name!r}", param="name")
    return msgspec.structs.replace(cordon, name=str(int(name)))


class CordonRules:
    """All cordons of a namespace. Two objects with the same cordons are equal."""

    def __init__(self, cordons: Iterable[Cordon] = ()) -> None:
        by_key = {(each.level, each.name, each.source, each.cluster): each for each in cordons}
        self.all = tuple(cordon for _, cordon in sorted(by_key.items()))
        self._by_level: dict[str, dict[str, list[Cordon]]] = {}
        for cordon in self.all:
            self._by_level.setdefault(cordon.level, {}).setdefault(cordon.name, []).append(cordon)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CordonRules) and self.all == other.all

    def __hash__(self) -> int:
        return hash(self.all)

    def __bool__(self) -> bool:
        return bool(self.all)

    def on(self, card: WorkerCard, domains: Mapping[str, str]) -> tuple[Cordon, ...]:
        """Return the cordons that hold for a worker. ``domains`` are its topology domains, trimmed."""
        found: list[Cordon] = []
        for level, names in self._by_level.items():
            for name in names_at(level, card, domains):
                found += names.get(name, ())
        here = domains.get(CLUSTER_LEVEL)
        return tuple(cordon for cordon in found if cordon.cluster in ("", here))


def names_at(level: str, card: WorkerCard, domains: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of a worker at ``level``; empty when it has none."""
    if level == WORKER_LEVEL:
        return (str(card.worker_id),)
    if level == NODE_LEVEL:
        named = (card.node, *(domains.get(domain, "") for domain in _NODE_DOMAINS))
        return tuple(dict.fromkeys(name for name in named if name))
    name = domains.get(level)
    return () if name is None else (name,)

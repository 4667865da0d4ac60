"""Grove's topology kinds, in the older spelling (``labelKey``) and the newer one (``key``)."""

from collections.abc import Mapping
from typing import NamedTuple, TypeVar

from pydantic import ValidationError

from kvrouter.kube.objects import fields_of
from kvrouter.operator.api.names import label_key_problem, level_problem
from kvrouter.operator.api.qos import (
    QOS_LEVELS_MAX,
    QOS_PAIRS_MAX,
    LevelQoS,
    LinkQoS,
    NetworkQoS,
    PairQoS,
)
from kvrouter.settings.problems import Path, Problem, dotted, problem_of

GROVE_GROUP = "grove.io"
GROVE_VERSION = "v1alpha1"
GROVE_PLURALS = {
    "ClusterTopologyBinding": "clustertopologybindings",
    "ClusterTopology": "clustertopologies",
}
"""The kinds and their API paths; of two objects with one name, the first kind's wins."""


KEY_CHARS_REPORTED = 80

AnyLink = TypeVar("AnyLink", bound=LinkQoS)


class Level(NamedTuple):
    """One level of a topology: its domain, and the node label that holds the domain's value."""

    domain: str
    label_key: str


class ClusterTopology(NamedTuple):
    """A cluster's topology: its levels, broadest first, and a line on each unusable part (``oddities``)."""

    name: str
    levels: tuple[Level, ...]
    kind: str = "ClusterTopologyBinding"
    oddities: tuple[str, ...] = ()
    network_qos: NetworkQoS | None = None
    """The links of its levels, across them, and between places; None if it states no links."""

    @property
    def domains(self) -> tuple[str, ...]:
        """The domains, broadest first."""
        return tuple(level.domain for level in self.levels)

    def label_key(self, domain: str) -> str | None:
        """Return the node label of ``domain``; None if it is no level."""
        return dict(self.levels).get(domain)


def read_topology(found: object) -> ClusterTopology | None:
    """Return the topology that one of Grove's objects describes; None for anything else.

    Other people write it, so no field is trusted: an unusable level is left out, with the reason among the
    oddities.
    """
    document = fields_of(found)
    name = _text(fields_of(document.get("metadata")).get("name"))
    if not name:
        return None
    kind = _text(document.get("kind")) or "ClusterTopologyBinding"
    spec = fields_of(document.get("spec"))
    levels: dict[str, Level] = {}
    qos = _QosReading()
    oddities: list[str] = []
    for number, entry in enumerate(_list(spec.get("levels"))):
        fields = fields_of(entry)
        domain = _text(fields.get("domain"))
        key = _text(fields.get("key")) or _text(fields.get("labelKey"))
        problem = _level_problem(domain, key, levels)
        if problem is None:
            levels[domain] = Level(domain, key)
            qos.read_level(domain, fields.get("networkQoS"), ("spec", "levels", number, "networkQoS"))
        else:
            oddities.append(f"{kind} {name}: spec.levels[{number}]: {problem}")
    qos.read_whole(spec.get("networkQoS"), levels, ("spec", "networkQoS"))
    oddities += [f"{kind} {name}: {dotted(problem.path)} {problem.must}" for problem in qos.problems]
    return ClusterTopology(name, tuple(levels.values()), kind, tuple(oddities), qos.stated())


class _QosReading:
    """Reads a topology's links: ``networkQoS`` of each level, and its own, across and pairs.

    An unusable link is left out, with the reason among the problems.
    """

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self._levels: list[LevelQoS] = []
        self._across: LinkQoS | None = None
        self._pairs: dict[tuple[str, str, str], PairQoS] = {}

    def stated(self) -> NetworkQoS | None:
        """Return the usable links; None without any."""
        found = NetworkQoS(levels=tuple(self._levels), across=self._across, pairs=tuple(self._pairs.values()))
        return None if found.is_empty else found

    def read_level(self, level: str, found: object, at: Path) -> None:
        """Read the ``networkQoS`` of a level from ``found``."""
        link = self._link(LevelQoS, found, at, level=level)
        if link is not None and len(self._levels) == QOS_LEVELS_MAX:
            self.problems.append(Problem(at, f"is left out: {QOS_LEVELS_MAX} levels have links already"))
        elif link is not None:
            self._levels.append(link)

    def read_whole(self, found: object, levels: Mapping[str, Level], at: Path) -> None:
        """Read the topology's ``across`` and ``pairs``."""
        if found is not None and not isinstance(found, dict):
            self.problems.append(Problem(at, "must be an object"))
        fields = fields_of(found)
        self._across = self._link(LinkQoS, fields.get("across"), (*at, "across"))
        for number, entry in enumerate(_list(fields.get("pairs"))):
            here = (*at, "pairs", number)
            if len(self._pairs) == QOS_PAIRS_MAX:
                self.problems.append(
                    Problem(here, f"and what follows is left out, beyond {QOS_PAIRS_MAX} pairs")
                )
                return
            pair = self._link(PairQoS, entry, here)
            if pair is not None and pair.level not in levels:
                self.problems.append(Problem((*here, "level"), f"{pair.level!r} is none of its levels"))
            elif pair is not None:
                self._pairs.setdefault(pair.place, pair)

    def _link(self, form: type[AnyLink], found: object, at: Path, **more: str) -> AnyLink | None:
        if found is None:
            return None
        if not isinstance(found, dict):
            self.problems.append(Problem(at, "must be an object"))
            return None
        names = [field.alias or name for name, field in form.model_fields.items()]
        ours = {name: found[name] for name in names if name in found}
        try:
            return form.model_validate({**ours, **more}, by_alias=True, by_name=False)
        except ValidationError as error:
            wrong = problem_of(error.errors(include_url=False)[0], form)
            self.problems.append(Problem((*at, *wrong.path), wrong.must))
            return None


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


def _list(found: object) -> list[object]:
    return found if isinstance(found, list) else []


def _text(found: object) -> str:
    return found.strip() if isinstance(found, str) else ""

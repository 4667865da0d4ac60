"""What is left of a fleet file without its mistaken values, so that the rest of it is checked too."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from pydantic import ValidationError

from kvrouter.config.fleet import FleetFile
from kvrouter.config.problems import Path, Problem, innermost, problem_of

ENTRY_SECTIONS = ("models", "workers")
"""Sections that are lists of named entries."""

ANY = -1
"""Stands for every entry of a section in the paths that a check depends on."""


class FleetRest(NamedTuple):
    """``fleet`` without the values at ``mistaken``, where defaults or stand-ins take their place."""

    fleet: FleetFile
    mistaken: frozenset[Path]

    def can_judge(self, depends_on: Sequence[Path]) -> bool:
        """Whether a check that reads these paths of the file would read nothing but what its owner wrote."""
        return not any(_touches(mistake, path) for mistake in self.mistaken for path in depends_on)


def validated(content: Mapping[str, object]) -> tuple[FleetRest | None, list[Problem]]:
    """Return what is left of a file without its mistaken values, None where too little is, and the mistakes.

    Some of them are found only once others are taken out: of two keys of one section that contradict two
    others, the validation names one pair.
    """
    problems: list[Problem] = []
    units: frozenset[Path] = frozenset()
    rest = dict(content)
    while True:
        try:
            return FleetRest(FleetFile.model_validate(rest), units), problems
        except ValidationError as error:
            found = innermost([problem_of(item, FleetFile) for item in error.errors()])
        new = [problem for problem in found if _unit(problem.path) not in units]
        if not new:
            return None, problems  # what is wrong now follows from what was taken out
        problems += new
        units |= {_unit(problem.path) for problem in new}
        rest = copy.deepcopy(dict(content))
        for unit in units:
            _take_out(rest, unit)


def _unit(path: Path) -> Path:
    """The part of the file that a mistake spoils: one key of an entry, or of a section, or one link."""
    if path[:2] == ("topology", "links"):
        return path[:4] if path[2:3] == ("within",) else path[:3]
    return path[:3] if path and path[0] in ENTRY_SECTIONS else path[:2]


def _take_out(rest: dict[str, object], unit: Path) -> None:
    section = rest.get(str(unit[0]))
    if len(unit) == 3 and isinstance(section, list):
        number, key = unit[1], unit[2]
        entry = section[number] if isinstance(number, int) else None
        if isinstance(entry, dict) and key == "name":
            entry["name"] = f"unnamed-{number}"
        elif isinstance(entry, dict):
            entry.pop(key, None)
    elif len(unit) == 2 and isinstance(section, list) and isinstance(unit[1], int):
        section[unit[1]] = {"name": f"unnamed-{unit[1]}"}
    elif unit == ("version",):
        rest["version"] = 1
    else:
        around: object = rest
        for key in unit[:-1]:
            around = around.get(str(key)) if isinstance(around, dict) else None
        if isinstance(around, dict):
            around.pop(unit[-1], None)


def _touches(mistake: Path, path: Path) -> bool:
    return all(mine in (its, ANY) for its, mine in zip(mistake, path, strict=False))


def entries(section: str, *keys: str) -> Iterator[Path]:
    """The paths of these keys in every entry of ``section``."""
    for key in keys:
        yield section, ANY, key

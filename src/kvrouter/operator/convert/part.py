"""Reads a mapping of a manifest field by field; the fields that are not read are reported as lost."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import UnionType
from typing import NamedTuple, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, JsonValue

from kvrouter.settings.problems import Path, Problem

Json = dict[str, JsonValue]

T = TypeVar("T")


class Note(NamedTuple):
    """A note on one field. ``is_lost``: the converted manifest does not do what the field says."""

    path: Path
    text: str
    is_lost: bool


@dataclass(slots=True)
class Notes:
    """The notes on one document; ``problems`` prevent its conversion."""

    found: list[Note] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def lost(self, at: Path, text: str) -> None:
        """Note that the converted manifest no longer does this."""
        self.found.append(Note(at, text, is_lost=True))

    def changed(self, at: Path, text: str) -> None:
        """Note that the converted manifest says this in another way."""
        self.found.append(Note(at, text, is_lost=False))


NO_FIELD = "kvrouter has no such field"


class Part:
    """One mapping, from which fields are taken; a null field counts as left out."""

    def __init__(self, content: Mapping[str, JsonValue], at: Path, notes: Notes) -> None:
        self.at = at
        self.notes = notes
        self._left = {name: value for name, value in content.items() if value is not None}

    def __contains__(self, name: str) -> bool:
        return name in self._left

    @property
    def names(self) -> tuple[str, ...]:
        """The fields that are not taken yet."""
        return tuple(self._left)

    def value(self, name: str) -> JsonValue:
        """Take any value; None where it is left out."""
        return self._left.pop(name, None)

    def text(self, name: str) -> str:
        """Take text; empty if it is missing, or malformed (a problem)."""
        found = self.value(name)
        return found if isinstance(found, str) else self._wrong(name, found, "", "text")

    def number(self, name: str) -> int | None:
        """Take a whole number; None if it is missing, or malformed (a problem)."""
        found = self.value(name)
        if isinstance(found, int) and not isinstance(found, bool):
            return found
        return self._wrong(name, found, None, "a whole number")

    def switch(self, name: str) -> bool:
        """Take true or false; false if it is missing, or malformed (a problem)."""
        found = self.value(name)
        return found if isinstance(found, bool) else self._wrong(name, found, False, "true or false")

    def mapping(self, name: str) -> Json:
        """Take a mapping as it is; empty if it is missing, or malformed (a problem)."""
        found = self.value(name)
        return {**found} if isinstance(found, dict) else self._wrong(name, found, {}, "a mapping")

    def objects(self, name: str) -> list[Json]:
        """Take a list of mappings; empty if it is missing, or malformed (a problem)."""
        found = self.value(name)
        if isinstance(found, list) and all(isinstance(entry, dict) for entry in found):
            return [{**entry} for entry in found if isinstance(entry, dict)]
        return self._wrong(name, found, [], "a list of mappings")

    def texts(self, name: str) -> list[str]:
        """Take a list of text; empty if missing, or malformed (a problem)."""
        found = self.value(name)
        if isinstance(found, list) and all(isinstance(entry, str) for entry in found):
            return [entry for entry in found if isinstance(entry, str)]
        return self._wrong(name, found, [], "a list of text")

    def part(self, name: str) -> "Part | None":
        """Take a mapping as a part; None if missing, empty if malformed (a problem)."""
        return Part(self.mapping(name), (*self.at, name), self.notes) if name in self else None

    def parts(self, name: str) -> "list[Part]":
        """Take a list of mappings whose own fields are taken too."""
        entries = self.objects(name)
        return [Part(entry, (*self.at, name, index), self.notes) for index, entry in enumerate(entries)]

    def known(self, name: str, model: type[BaseModel]) -> Json:
        """Take the fields that ``model`` has, in nested models too; the others are lost."""
        part = self.part(name)
        if part is None:
            return {}
        found = part.fields(model)
        part.close()
        return found

    def fields(self, model: type[BaseModel]) -> Json:
        """Take the fields that ``model`` has."""
        taken: Json = {}
        for own, info in model.model_fields.items():
            alias = info.alias or own
            if alias not in self:
                continue
            inner = _model_in(info.annotation)
            is_mapping = inner is not None and isinstance(self._left[alias], dict)
            taken[alias] = self.known(alias, inner) if inner and is_mapping else self.value(alias)
        return taken

    def drop_off(self, name: str) -> None:
        """Take a field that is switched off: false, or a mapping with ``enabled: false``."""
        found = self._left.get(name)
        if found is False or (isinstance(found, dict) and found.get("enabled") is False):
            self.value(name)

    def close(self, why: Mapping[str, str] | None = None) -> None:
        """Note each field that was not taken as lost; ``why`` has instructions for some of them."""
        for name in self._left:
            self.notes.lost((*self.at, name), (why or {}).get(name, NO_FIELD))
        self._left.clear()

    def _wrong(self, name: str, found: JsonValue, nothing: T, must: str) -> T:
        if found is not None:
            self.notes.problems.append(Problem((*self.at, name), f"must be {must}"))
        return nothing


def listed(content: Json, name: str, at: Path, notes: Notes) -> list[Json]:
    """Return a list of mappings that is passed on; empty if it is missing, or malformed (a problem)."""
    return Part({name: content.get(name)}, at, notes).objects(name)


def check_container(container: Json, at: Path, notes: Notes) -> None:
    """Note each field with a wrong form in a container, among those that are read."""
    part = Part(container, at, notes)
    for name in ("env", "envFrom", "volumeMounts"):
        part.objects(name)
    for name in ("command", "args"):
        part.texts(name)
    part.mapping("resources")


def _model_in(annotation: object) -> type[BaseModel] | None:
    """Return the first model in a field's annotation; None without a model."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) not in (Union, UnionType):
        return None
    return next((found for each in get_args(annotation) if (found := _model_in(each)) is not None), None)


def named(name: str, pattern: str) -> str:
    """Return ``name`` with ``-`` in place of the characters that ``pattern`` does not allow."""
    if re.fullmatch(pattern, name):
        return name
    plain = re.sub(r"-+", "-", re.sub(r"[^-A-Za-z0-9]", "-", name)).strip("-")
    return plain if re.match(r"[A-Za-z]", plain) else f"c-{plain}".rstrip("-")

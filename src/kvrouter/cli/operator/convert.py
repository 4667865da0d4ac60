"""``kvrouter operator convert``: Dynamo's manifests as kvrouter's, on standard output."""

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, cast

import yaml
from pydantic import JsonValue

from kvrouter.cli.output import echo
from kvrouter.core.errors import ConfigError
from kvrouter.operator.api.deployment import PROBLEMS_MAX
from kvrouter.operator.convert import Conversion, convert
from kvrouter.settings.problems import Document, dotted, read_documents
from kvrouter.settings.problems import Path as Place

GOOD, LOST = 0, 1
"""Exit codes: nothing is lost, or something is; 2 is that of an invalid file."""

TEXT_MAX_CHARS = 16 * 1024 * 1024
"""A file with more text than this, aliases counted wherever they are used, is refused."""

DEPTH_MAX = 100
"""A document that is nested deeper is refused: it is no manifest."""


class _Dumper(yaml.SafeDumper):
    """YAML without anchors: a value that is used twice is written twice."""

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002 - the signature is PyYAML's
        return True


def _text(dumper: _Dumper, text: str) -> yaml.Node:
    """Write a text of several lines as a block."""
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


class _Numbered(NamedTuple):
    """A document, and which of the file's it is."""

    document: Document
    number: int
    of: int

    def place(self, path: Place) -> str:
        """Return the place of ``path``: ``llm.yaml:12: document 2: spec.services.Frontend``."""
        where = f"{self.document.name}:{self.document.line_of(path)}"
        which = f": document {self.number}" if self.of > 1 else ""
        return f"{where}{which}: {dotted(path)}" if path else f"{where}{which}"


def convert_file(path: Path) -> int:
    """Write the conversion of ``path``, and report its losses. Return the exit code; raise ConfigError,
    before any output, for input that can't be read or converted.
    """
    read = read_documents(path)
    if not read:
        raise ConfigError(f"{path}: has no document", param=str(path))
    documents = [_Numbered(document, number, len(read)) for number, document in enumerate(read, 1)]
    chars_left = TEXT_MAX_CHARS
    conversions: list[tuple[_Numbered, Conversion]] = []
    for document in documents:
        chars_left -= _checked(document, chars_left)
        content = cast(dict[str, JsonValue], document.document.content)
        conversions.append((document, convert(content)))
    errors = [
        f"{document.place(problem.path)}: {problem.must}"
        for document, found in conversions
        for problem in found.problems
    ]
    if errors:
        n_more = len(errors) - PROBLEMS_MAX
        more = [f"{path}: {n_more} more problems"] if n_more > 0 else []
        raise ConfigError("\n".join([*errors[:PROBLEMS_MAX], *more]), param=str(path))
    manifests = [manifest for _, found in conversions for manifest in found.manifests]
    if manifests:
        yaml.dump_all(manifests, sys.stdout, Dumper=_Dumper, sort_keys=False, width=110, allow_unicode=True)
    for document, found in conversions:
        for _, line in sorted(_lines(document, found)):
            echo(line, err=True)
    return LOST if any(note.is_lost for _, found in conversions for note in found.notes) else GOOD


def _lines(document: _Numbered, found: Conversion) -> Iterator[tuple[int, str]]:
    """Yield what became of each field, and the line it is on."""
    for note in found.notes:
        became = "lost" if note.is_lost else "changed"
        yield document.document.line_of(note.path), f"{document.place(note.path)}: {became}: {note.text}"


def _checked(document: _Numbered, chars_max: int) -> int:
    """Return how many characters a document has. Raises ConfigError for values without a JSON form, and for
    too much text.
    """
    n_chars = 0
    for path, value in _parts(document.document.content, ()):
        if isinstance(value, str):
            n_chars += len(value)
        must = _must(path, value)
        if n_chars > chars_max:
            must = f"the file must have ≤ {TEXT_MAX_CHARS} characters, aliases counted where they are used"
        if must:
            raise ConfigError(f"{document.place(path)}: {must}", param=dotted(path))
    return n_chars


def _must(path: Place, value: object) -> str:
    if len(path) > DEPTH_MAX:
        return f"must have ≤ {DEPTH_MAX} levels"
    if isinstance(value, dict):
        return "" if all(isinstance(key, str) for key in value) else "keys must be text (put them in quotes)"
    if value is None or isinstance(value, list | str | bool | int):
        return ""
    return "" if isinstance(value, float) and math.isfinite(value) else "must be a value that JSON has"


def _parts(content: object, path: Place) -> Iterator[tuple[Place, object]]:
    """Yield each mapping, list and value with its place, the outer ones first."""
    yield path, content
    if isinstance(content, dict):
        for key, value in content.items():
            yield from _parts(value, (*path, key))
    elif isinstance(content, list):
        for index, entry in enumerate(content):
            yield from _parts(entry, (*path, index))

"""Problems of a setting or a fleet file: each names the field, the line and the fix."""

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path as FilePath
from typing import NamedTuple

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from kvrouter.core.errors import ConfigError
from kvrouter.core.files import open_regular
from kvrouter.settings.setting import HIDDEN_VALUE, model_in, model_tagged
from kvrouter.settings.variables import without_prefix

Path = tuple[str | int, ...]
"""The place of a value in a document: keys and list positions, from the top."""

FieldPlace = Callable[[Path], str]
"""Names where the value at a path was written: a file and line, a flag, or the path itself."""


KEY_ERRORS = ("no_effect", "set_twice")
"""Types of errors that a section raises as a whole, and that are about its key ``ctx["key"]``."""


class Problem(NamedTuple):
    """One mistake: its path, and what it must be instead."""

    path: Path
    must: str


def dotted(path: Path) -> str:
    """Return ``path`` as people write it: ``workers[0].replicas``."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `` (did you mean …?)`` for the nearest known word, or an empty text if none is near."""
    nearest = get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" (did you mean {nearest[0]}?)" if nearest else ""


def did_you_mean_variable(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return `` (did you mean …?)`` for the nearest known variable, with any prefix."""
    by_rest: dict[str, str] = {}
    for variable in sorted(known, reverse=True):  # of two spellings, DYN_… is the one that is documented
        by_rest[without_prefix(variable)] = variable
    nearest = get_close_matches(without_prefix(name), by_rest, n=1, cutoff=cutoff)
    return f" (did you mean {by_rest[nearest[0]]}?)" if nearest else ""


def raise_problems(problems: Sequence[Problem], place: FieldPlace) -> None:
    """Raise :func:`config_error` of ``problems``; return if there are none."""
    if problems:
        raise config_error(problems, place)


def innermost(problems: Sequence[Problem]) -> list[Problem]:
    """Leave out what only follows from a problem further in: a list is too short as its entry is wrong."""
    return [
        problem
        for problem in problems
        if not any(
            len(other.path) > len(problem.path) and other.path[: len(problem.path)] == problem.path
            for other in problems
        )
    ]


def config_error(problems: Sequence[Problem], place: FieldPlace) -> ConfigError:
    """Return one error with a line per problem, of which there must be one at least.

    ``place(path)`` begins each line: a file and line, or the flag or variable that the value came from.
    """
    lines = [f"{place(problem.path)}: {problem.must}" for problem in problems]
    return ConfigError("\n".join(lines), param=dotted(problems[0].path))


def problem_of(error: ErrorDetails, model: type[BaseModel]) -> Problem:
    """Return an error of validating ``model`` in the terms of the person who wrote the value."""
    path, around = _walked(error["loc"], model)
    kind = error["type"]
    if kind in KEY_ERRORS:
        return Problem((*path, error.get("ctx", {})["key"]), error["msg"])
    if kind == "extra_forbidden":
        known = () if around is None else around.model_fields
        return Problem(path, f"unknown key{did_you_mean(str(path[-1]), known)}")
    if kind == "missing":
        return Problem(path, "is required")
    if kind == "union_tag_invalid":
        context = error.get("ctx", {})
        expected = " or ".join(str(context["expected_tags"]).rsplit(", ", 1))
        tag = str(context["discriminator"]).strip("'")
        return Problem((*path, tag), f"must be {expected}, not {context['tag']!r}")
    return Problem(path, f"{_must(error)}{_but_is(error)}")


def _walked(loc: Path, model: type[BaseModel]) -> tuple[Path, type[BaseModel] | None]:
    """Return the path of ``loc`` in the document, which has no tags of unions, and the model around it."""
    path: list[str | int] = []
    around: type[BaseModel] | None = model
    inside: type[BaseModel] | None = model
    union: FieldInfo | None = None
    for part in loc:
        tagged = None if union is None else model_tagged(union, part)
        union = None
        if part == "[key]":
            continue
        if tagged is not None:
            inside = tagged
            continue
        path.append(part)
        if isinstance(part, int):
            continue
        around = inside
        field = None if inside is None else inside.model_fields.get(part)
        if field is not None:
            inside, union = model_in(field.annotation), field
    return tuple(path), around


_TYPE_WORDS = {
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "int_parsing": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "string_type": "must be text (put it in quotes)",
    "tuple_type": "must be a list",
    "list_type": "must be a list",
    "mapping_type": "must be a mapping of keys to values",
    "dict_type": "must be a mapping of keys to values",
    "invalid_key": "keys must be text",
    "model_type": "must be a mapping of keys to values",
    "model_attributes_type": "must be a mapping of keys to values",
}

_BOUND_WORDS = {
    "greater_than_equal": ("ge", "≥"),
    "greater_than": ("gt", ">"),
    "less_than_equal": ("le", "≤"),
    "less_than": ("lt", "<"),
}


def _must(error: ErrorDetails) -> str:
    kind = error["type"]
    context = error.get("ctx", {})
    if kind in _TYPE_WORDS:
        return _TYPE_WORDS[kind]
    if kind in _BOUND_WORDS:
        key, sign = _BOUND_WORDS[kind]
        return f"must be {sign} {_number(context[key])}"
    if kind in ("enum", "literal_error"):
        return f"must be {context['expected']}"
    if kind in ("string_too_short", "too_short"):
        return (
            "must not be empty"
            if context["min_length"] == 1
            else f"must have ≥ {context['min_length']} parts"
        )
    if kind in ("string_too_long", "too_long"):
        return (
            f"must have ≤ {context['max_length']} {'characters' if kind.startswith('string') else 'entries'}"
        )
    return error["msg"]


def _number(limit: object) -> str:
    return str(int(limit)) if isinstance(limit, float) and limit.is_integer() else str(limit)


_SHOWN_MAX_CHARS = 60
_USER_IN_URL = re.compile(r"//.*@")
"""Up to the last @: a password may have one, and any other character."""


def without_password(text: str) -> str:
    """Return ``text`` without the users and passwords of its URLs: mistakes are shown and logged."""
    return _USER_IN_URL.sub("//…@", text)


def _but_is(error: ErrorDetails) -> str:
    value = error["input"]
    if error["type"] in ("foreign", HIDDEN_VALUE):
        return ""  # its message has the value, or nobody may read it
    if isinstance(value, bool):
        return f", not {str(value).lower()}"
    if isinstance(value, int | float | str) and value != "":
        text = without_password(repr(value))
        return f", not {text if len(text) <= _SHOWN_MAX_CHARS else text[:_SHOWN_MAX_CHARS] + '…'}"
    if isinstance(value, list) and error["type"] in _TYPE_WORDS:
        return ", not a list"
    return ""


DOCUMENT_MAX_BYTES = 4 * 1024 * 1024
"""A larger file is refused: it is not a fleet file."""

DOCUMENT_MAX_KEYS = 100_000
"""With more keys and entries, aliases counted wherever they are used, a file is refused."""


STDIN = "standard input"
"""The name of the document for the path ``-``."""


class _Loader(yaml.SafeLoader):
    """YAML as people expect it, and as YAML 1.2 has it: ``25e9`` is a number, and a date is text."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def _date(loader: _Loader, node: yaml.ScalarNode) -> str:
    return loader.construct_scalar(node)


def _whole(loader: _Loader, node: yaml.ScalarNode) -> object:
    """A whole number; ``22:30`` is one of base 60 in YAML 1.1 alone."""
    return loader.construct_scalar(node) if ":" in node.value else loader.construct_yaml_int(node)


_Loader.add_constructor("tag:yaml.org,2002:timestamp", _date)
_Loader.add_constructor("tag:yaml.org,2002:int", _whole)


class Document:
    """The content of one YAML file, and the line of every key and list entry in it."""

    def __init__(self, name: str, content: Mapping[str, object], lines: Mapping[Path, int]) -> None:
        self.name = name
        self.content = content
        self._lines = lines

    def line_of(self, path: Path) -> int:
        """Return the line, from 1, of ``path``, or of the nearest thing around it that is in the file."""
        while path and path not in self._lines:
            path = path[:-1]
        return self._lines.get(path, 1)

    def place(self, path: Path) -> str:
        """Return the place of ``path`` for people: ``fleet.yaml:12: workers[0].replicas``."""
        where = f"{self.name}:{self.line_of(path)}"
        return f"{where}: {dotted(path)}" if path else where


def read_document(path: FilePath) -> Document:
    """Read a YAML file; raise ConfigError that names the file and the line for what cannot be read."""
    return parse_document(_text_of(path), str(path))


def read_documents(path: FilePath) -> list[Document]:
    """Read a YAML file of several documents, or standard input for ``-``; raise ConfigError as above."""
    if str(path) != "-":
        return parse_documents(_text_of(path), str(path))
    return parse_documents(_decoded(sys.stdin.buffer.read(DOCUMENT_MAX_BYTES + 1), STDIN), STDIN)


def _text_of(path: FilePath) -> str:
    try:
        with open_regular(path) as file:
            raw = file.read(DOCUMENT_MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # a name with a null byte is none
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"{path}: cannot be read: {why}", param=str(path)) from error
    return _decoded(raw, str(path))


def _decoded(raw: bytes, name: str) -> str:
    if len(raw) > DOCUMENT_MAX_BYTES:
        raise ConfigError(f"{name}: must have ≤ {DOCUMENT_MAX_BYTES} bytes", param=name)
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}: must be UTF-8 text: {error.reason}", param=name) from error


def parse_document(text: str, name: str) -> Document:
    """Parse YAML; raise ConfigError that names the line for bad syntax and for keys given twice."""
    (document,) = _parsed(text, name, _single)
    return document


def parse_documents(text: str, name: str) -> list[Document]:
    """Parse YAML of several documents, without the empty ones; raise ConfigError as above."""
    return _parsed(text, name, _several)


def _parsed(
    text: str, name: str, nodes: Callable[[yaml.SafeLoader], Iterator[yaml.Node | None]]
) -> list[Document]:
    try:
        return [*_documents(text, name, nodes)]
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{name}:{line}: not YAML: {error.problem}", param=name) from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(
            f"{name}:{line}: not YAML: {text[error.position]!r}: {error.reason}", param=name
        ) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{name}: not YAML: {error}", param=name) from error
    except (LookupError, AttributeError, TypeError) as error:
        # PyYAML's own, for a scalar that is not what its tag says
        raise ConfigError(f"{name}: not YAML: a value does not fit its tag", param=name) from error


def _single(loader: yaml.SafeLoader) -> Iterator[yaml.Node | None]:
    yield loader.get_single_node()


def _several(loader: yaml.SafeLoader) -> Iterator[yaml.Node | None]:
    while loader.check_node():
        node = loader.get_node()
        if node is not None and node.tag != "tag:yaml.org,2002:null":
            yield node


def _documents(
    text: str, name: str, nodes: Callable[[yaml.SafeLoader], Iterator[yaml.Node | None]]
) -> Iterator[Document]:
    """Yield the documents of a file, with the line of every value. Raises PyYAML's errors, and ConfigError
    for keys given twice, and for a document that is no mapping.
    """
    loader = _Loader(text)  # reads the first characters, and refuses wrong ones
    n_left = DOCUMENT_MAX_KEYS
    try:
        for node in nodes(loader):
            lines: dict[Path, int] = {}
            problems: list[Problem] = []
            if node is not None:
                _walk(node, (), lines, problems, n_left)
            n_left -= len(lines)
            raise_problems(problems, Document(name, {}, lines).place)
            content = loader.construct_document(node) if node is not None else None
            if not isinstance(content, dict):
                line = lines.get((), 1)
                raise ConfigError(f"{name}:{line}: must be a mapping of keys to values", param=name)
            yield Document(name, content, lines)
    finally:
        loader.dispose()


def _walk(
    node: yaml.Node, path: Path, lines: dict[Path, int], problems: list[Problem], keys_max: int
) -> None:
    """Note the line of every value under ``node``; a repeated key in one mapping is a problem.

    An alias is walked again wherever it is used, and so its lines are those of the anchor.
    """
    lines.setdefault(path, node.start_mark.line + 1)
    if len(lines) > keys_max:
        raise ValueError(f"more than {DOCUMENT_MAX_KEYS} keys and entries")
    if isinstance(node, yaml.MappingNode):
        keys: set[str] = set()
        for key_node, value_node in node.value:
            key = str(key_node.value)
            below = (*path, key)
            if key in keys:
                problems.append(Problem(below, f"given again on line {key_node.start_mark.line + 1}"))
            keys.add(key)
            lines.setdefault(below, key_node.start_mark.line + 1)
            _walk(value_node, below, lines, problems, keys_max)
    elif isinstance(node, yaml.SequenceNode):
        for position, item in enumerate(node.value):
            _walk(item, (*path, position), lines, problems, keys_max)

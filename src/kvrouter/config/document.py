"""A YAML file that knows on which line each of its keys stands."""

import re
from collections.abc import Mapping
from pathlib import Path as FilePath

import yaml

from kvrouter.config.problems import Path, Problem, dotted, raise_problems
from kvrouter.core.errors import ConfigError

DOCUMENT_MAX_BYTES = 4 * 1024 * 1024
"""A larger file is refused: it is not a fleet file."""

DOCUMENT_MAX_KEYS = 100_000
"""With more keys and entries, aliases counted wherever they are used, a file is refused."""


class _Loader(yaml.SafeLoader):
    """YAML as people expect it: ``25e9`` is a number, as in YAML 1.2."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


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
        """Return where ``path`` stands, as people look for it: ``fleet.yaml:12: workers[0].replicas``."""
        where = f"{self.name}:{self.line_of(path)}"
        return f"{where}: {dotted(path)}" if path else where


def read_document(path: FilePath) -> Document:
    """Read a YAML file; raise ConfigError that names the file and the line for what cannot be read."""
    try:
        size = path.stat().st_size
        raw = path.read_bytes() if size <= DOCUMENT_MAX_BYTES else b""
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}", param=str(path)) from error
    if size > DOCUMENT_MAX_BYTES:
        raise ConfigError(f"{path}: must have ≤ {DOCUMENT_MAX_BYTES} bytes, not {size}", param=str(path))
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: must be UTF-8 text: {error.reason}", param=str(path)) from error
    return parse_document(text, str(path))


def parse_document(text: str, name: str) -> Document:
    """Parse YAML; raise ConfigError that names the line for bad syntax and for keys given twice."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        lines: dict[Path, int] = {}
        problems: list[Problem] = []
        if node is not None:
            _walk(node, (), lines, problems)
        raise_problems(problems, lambda path: f"{name}:{lines[path]}: {dotted(path)}")
        content = loader.construct_document(node) if node is not None else None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{name}:{line}: not YAML: {error.problem}", param=name) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{name}: not YAML: {error}", param=name) from error
    finally:
        loader.dispose()
    if not isinstance(content, dict):
        raise ConfigError(f"{name}:1: must be a mapping of keys to values", param=name)
    return Document(name, content, lines)


def _walk(node: yaml.Node, path: Path, lines: dict[Path, int], problems: list[Problem]) -> None:
    """Note the line of everything under ``node``; a key that stands twice in one mapping is a problem.

    An alias is walked again wherever it is used, and so its lines are those of the anchor.
    """
    lines.setdefault(path, node.start_mark.line + 1)
    if len(lines) > DOCUMENT_MAX_KEYS:
        raise ValueError(f"more than {DOCUMENT_MAX_KEYS} keys and entries")
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key_node, value_node in node.value:
            key = str(key_node.value)
            below = (*path, key)
            if key in seen:
                problems.append(Problem(below, f"given again on line {key_node.start_mark.line + 1}"))
            seen.add(key)
            lines.setdefault(below, key_node.start_mark.line + 1)
            _walk(value_node, below, lines, problems)
    elif isinstance(node, yaml.SequenceNode):
        for position, item in enumerate(node.value):
            _walk(item, (*path, position), lines, problems)

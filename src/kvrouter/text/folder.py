"""A model's folder: the JSON files that describe its tokenizer."""

import json
from collections.abc import Mapping
from pathlib import Path

from kvrouter.core.errors import ConfigError


def read_json_object(path: Path) -> Mapping[str, object]:
    """Return the object in ``path``, empty when there is no such file; ``ConfigError`` for anything else."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}", param=str(path)) from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} does not hold a JSON object", param=str(path))
    return content


def token_content(entry: object) -> str | None:
    """Return the text of a token that a configuration gives as a string or as ``{"content": …}``."""
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else None

"""Tokenizers in other formats than ``tokenizer.json``, by the converters of the transformers library.

That is the extra ``tokenizers``; nothing of it is imported before such a tokenizer is read. Code that a
folder brings along is never run.
"""

from importlib import import_module
from pathlib import Path

from tokenizers import Tokenizer as Backend

from kvrouter.core.errors import ConfigError

OTHER_FORMATS = ("tokenizer.model", "tiktoken.model", "tekken.json", "vocab.json", "merges.txt")
"""SentencePiece or tiktoken, tiktoken, Mistral's, and the two files of a byte-level BPE."""


def other_formats(folder: Path) -> list[str]:
    """Return the files of a folder that hold a tokenizer in another format."""
    return [name for name in OTHER_FORMATS if (folder / name).is_file()]


def converted_backend(folder: Path) -> Backend:
    """Return the tokenizer of a folder that has none in ``tokenizer.json``: what an engine that reads it by
    the same library makes of it. Takes seconds. Raises ConfigError that says what to install, or what is
    wrong.
    """
    names = ", ".join(other_formats(folder))
    try:
        transformers = import_module("transformers")
    except ImportError as error:
        raise ConfigError(
            f"{folder} has no tokenizer.json, but {names}, which pip install 'kvrouter[tokenizers]' makes "
            "readable",
            param=str(folder),
        ) from error
    try:
        loaded = transformers.AutoTokenizer.from_pretrained(
            str(folder), trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # a converter raises whatever it meets
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise ConfigError(f"{folder}: {names} cannot be converted: {why}", param=str(folder)) from error
    backend = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(backend, Backend):
        raise ConfigError(
            f"{folder}: {names} cannot be converted: {type(loaded).__name__} has no form in the tokenizers "
            "library",
            param=str(folder),
        )
    return backend

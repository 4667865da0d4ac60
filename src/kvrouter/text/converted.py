"""Tokenizers in other formats than ``tokenizer.json``, by the converters of the transformers library.

That is the extra ``tokenizers``; nothing of it is imported before such a tokenizer is read. Code that a
folder brings along is never run.
"""

import os
from importlib import import_module
from pathlib import Path

from tokenizers import Tokenizer as Backend
from tokenizers import processors

from kvrouter.core.errors import ConfigError

TEKKEN = "tekken.json"

OTHER_FORMATS = (
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tiktoken.model",
    TEKKEN,
    "vocab.json",
    "merges.txt",
)
"""SentencePiece or tiktoken, SentencePiece twice, tiktoken, Mistral's, the two files of a byte-level BPE."""

TEKKEN_BEGIN = "<s>"


def other_formats(folder: Path) -> list[str]:
    """Return the files of a folder that hold a tokenizer in another format."""
    return [name for name in OTHER_FORMATS if (folder / name).is_file()]


def is_read_by_mistral(folder: Path) -> bool:
    """Whether vLLM reads a folder's tokenizer by mistral-common, though it have a ``tokenizer.json`` too: its
    weights are in Mistral's own format, or it has none and no other tokenizer.
    """
    if not (folder / TEKKEN).is_file():
        return False
    if any(folder.glob("consolidated*.safetensors")):
        return True
    return not (folder / "tokenizer.json").is_file() and not any(folder.glob("*.safetensors"))


def converted_backend(folder: Path) -> Backend:
    """Return the tokenizer of a folder from another format than ``tokenizer.json``: what an engine that reads
    it by the same library makes of it. Takes seconds. Raises ConfigError that says what to install, or what
    is wrong.
    """
    names = ", ".join(other_formats(folder))
    # Without it the library says on standard error that it has no PyTorch.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        transformers = import_module("transformers")
    except ImportError as error:
        raise ConfigError(
            f"{folder} has no tokenizer.json, but {names}, which pip install 'kvrouter[tokenizers]' makes "
            "readable",
            param=str(folder),
        ) from error
    try:
        if (folder / TEKKEN).is_file():
            mistral = import_module("transformers.integrations.mistral")
            loaded = mistral.convert_tekken_tokenizer(str(folder / TEKKEN))
        else:
            loaded = transformers.AutoTokenizer.from_pretrained(
                str(folder), trust_remote_code=False, local_files_only=True
            )
    except Exception as error:  # a converter raises whatever it meets
        why = next((line for line in str(error).splitlines() if line.strip()), "")
        raise ConfigError(
            f"{folder}: {names} cannot be converted: {type(error).__name__}: {why}", param=str(folder)
        ) from error
    backend = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(backend, Backend):
        raise ConfigError(
            f"{folder}: {names} cannot be converted: {type(loaded).__name__} has no form in the tokenizers "
            "library",
            param=str(folder),
        )
    if is_read_by_mistral(folder):
        _begin_prompts(backend)
    return backend


def _begin_prompts(backend: Backend) -> None:
    """Let a completion's prompt begin as mistral-common begins it."""
    begin_id = backend.token_to_id(TEKKEN_BEGIN)
    if begin_id is not None:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{TEKKEN_BEGIN} $A", special_tokens=[(TEKKEN_BEGIN, begin_id)]
        )

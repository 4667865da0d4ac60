"""Converts tokenizers in other formats than ``tokenizer.json``, with the transformers library.

The library is the extra ``tokenizers``, imported only for such a tokenizer. Code in a folder is never run.
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
"""SentencePiece or tiktoken, twice SentencePiece, tiktoken, Mistral's, and byte-level BPE in two files."""

TEKKEN_BEGIN = "<s>"


def other_formats(folder: Path) -> list[str]:
    """Return the files of a folder that hold a tokenizer in another format than ``tokenizer.json``."""
    return [name for name in OTHER_FORMATS if (folder / name).is_file()]


def is_read_by_mistral(folder: Path) -> bool:
    """Whether vLLM reads a folder's tokenizer with mistral-common, even next to a ``tokenizer.json``: the
    weights are in Mistral's format, or the folder has neither weights nor a ``tokenizer.json``.
    """
    if not (folder / TEKKEN).is_file():
        return False
    if any(folder.glob("consolidated*.safetensors")):
        return True
    return not (folder / "tokenizer.json").is_file() and not any(folder.glob("*.safetensors"))


def converted_backend(folder: Path) -> Backend:
    """Return the converted tokenizer of a folder, equal to that of an engine with the same library. Takes
    seconds. Raises ConfigError with the package to install, or the reason.
    """
    names = ", ".join(other_formats(folder))
    # Without it the library warns on standard error that PyTorch is missing.
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
    except Exception as error:  # converters raise arbitrary exceptions
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
    """Make completions' prompts begin with ``TEKKEN_BEGIN``, as mistral-common does."""
    begin_id = backend.token_to_id(TEKKEN_BEGIN)
    if begin_id is not None:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{TEKKEN_BEGIN} $A", special_tokens=[(TEKKEN_BEGIN, begin_id)]
        )

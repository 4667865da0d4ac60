"""Finds a tokenizer's folder: packaged, local, or of a Hugging Face repository.

A repository is looked up in the local cache of the Hugging Face tools first, and downloaded if it is not
there. Their environment variables apply: ``HF_HOME``, ``HF_ENDPOINT``, ``HF_TOKEN``, and
``HF_HUB_OFFLINE=1``, which forbids the download.
"""

import logging
import re
from pathlib import Path

from kvrouter.core.errors import ConfigError
from kvrouter.text.converted import OTHER_FORMATS, other_formats

MOCK_TOKENIZER = "mock"
"""The name of the tokenizer that ships with the package."""

ENGINE_TOKENIZER = "engine"
"""The name that makes the model's engines tokenize its prompts, at their ``/tokenize``."""

_WORDS = (MOCK_TOKENIZER, ENGINE_TOKENIZER)

MOCK_FOLDER = Path(__file__).parent / "data" / "mock"

TOKENIZER_FILE = "tokenizer.json"

REPOSITORY = re.compile(
    r"(?P<name>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(@(?P<revision>[\w.-][\w./-]{0,127}))?"
)
"""A repository, as ``Qwen/Qwen3-8B``, or one revision of it, as ``Qwen/Qwen3-8B@main``."""

FILES = (
    TOKENIZER_FILE,
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "config.json",
    *OTHER_FORMATS,
)
"""The files that are downloaded of a repository; weights are not."""

DOWNLOAD_MAX_BYTES = 256 * 1024 * 1024
"""A repository whose :data:`FILES` are larger is refused before anything is downloaded."""


def is_repository(source: str) -> bool:
    """Whether ``source`` has the form of a repository, and is not a local folder."""
    return REPOSITORY.fullmatch(source) is not None and not Path(source).is_dir()


def settled_source(source: str) -> str:
    """Return ``source`` with a folder made absolute, for other processes on this host."""
    if source in _WORDS or is_repository(source):
        return source
    return str(Path(source).resolve())


def checked_source(source: str) -> str:
    """Return ``source`` as :func:`settled_source` does; raise :class:`ConfigError` unless it is a local
    folder or the name of a repository. Nothing is read.
    """
    if source not in _WORDS and not is_repository(source) and not Path(source).is_dir():
        raise ConfigError(f"{source} is no folder here, nor the name of a repository", param=source)
    return settled_source(source)


def tokenizer_folder(source: str) -> Path:
    """Return the folder with the tokenizer of ``source``, after downloading a repository that is not cached.

    Blocks up to the Hugging Face client's timeouts. Raises :class:`ConfigError`.
    """
    if source == MOCK_TOKENIZER:
        return MOCK_FOLDER
    if source == ENGINE_TOKENIZER:
        raise ConfigError(
            "engine is the tokenizer of engines that run already and have a /tokenize", param=source
        )
    folder = _repository_folder(source) if is_repository(source) else Path(source)
    if not _has_tokenizer(folder):
        lacks = f"has no {TOKENIZER_FILE} here" if folder.is_dir() else "is no folder here"
        raise ConfigError(f"{source} {lacks}", param=source)
    return folder


def _has_tokenizer(folder: Path) -> bool:
    return (folder / TOKENIZER_FILE).is_file() or bool(other_formats(folder))


def _repository_folder(source: str) -> Path:
    # Importing the client takes a third of a second; only a repository needs it.
    from huggingface_hub import snapshot_download  # noqa: PLC0415
    from huggingface_hub.errors import (  # noqa: PLC0415
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
    )
    from huggingface_hub.utils.tqdm import disable_progress_bars  # noqa: PLC0415

    match = REPOSITORY.fullmatch(source)
    if match is None:
        raise ConfigError(f"{source} is no Hugging Face repository", param=source)
    disable_progress_bars()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    name, revision, files = match["name"], match["revision"], list(FILES)
    other: Path | None = None
    try:
        cached = Path(snapshot_download(name, revision=revision, allow_patterns=files, local_files_only=True))
        if (cached / TOKENIZER_FILE).is_file():
            return cached
        other = cached if _has_tokenizer(cached) else None
    except LocalEntryNotFoundError:
        pass  # it is not in the cache
    except HFValidationError as error:
        raise ConfigError(f"{source}: {error}", param=source) from error
    try:
        planned = snapshot_download(name, revision=revision, allow_patterns=files, dry_run=True)
        found = {each.filename: each.file_size or 0 for each in planned if not isinstance(each, str)}
        if found.keys().isdisjoint((TOKENIZER_FILE, *OTHER_FORMATS)):
            raise ConfigError(f"{source}: the repository has no {TOKENIZER_FILE}", param=source)
        size = sum(found.values())
        if size > DOWNLOAD_MAX_BYTES:
            raise ConfigError(
                f"{source}: the repository's tokenizer has {size} bytes, and ≤ {DOWNLOAD_MAX_BYTES} are read",
                param=source,
            )
        return Path(snapshot_download(name, revision=revision, allow_patterns=files))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        if other is not None:
            return other
        if not isinstance(error.__cause__ or error, OfflineModeIsEnabled):
            message = str(error.__cause__ or error).strip().partition("\n")[0]
            raise ConfigError(
                f"{source} is no folder here, and cannot be downloaded from the Hugging Face hub: {message}",
                param=source,
            ) from error
        raise ConfigError(
            f"{source} is no folder here and not in the Hugging Face cache, and HF_HUB_OFFLINE forbids a "
            "download",
            param=source,
        ) from error

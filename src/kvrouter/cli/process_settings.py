"""The settings and files of a command that runs a process of a fleet: read, warned of, and logging begun."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from kvrouter.cli.output import echo
from kvrouter.cli.setting_flags import given_flags
from kvrouter.core.errors import ConfigError
from kvrouter.settings.option import option

if TYPE_CHECKING:
    from kvrouter.core.ids import ModelName
    from kvrouter.engines.attach import AttachSpec
    from kvrouter.kernel.topology.link_table import LinkTable
    from kvrouter.settings.problems import Document
    from kvrouter.settings.sources import Loaded
    from kvrouter.settings.tree import Settings

MODEL_PATH_HELP = (
    "A model's tokenizer: this host's folder, a Hugging Face repository, or engine; without it what its "
    "workers name is read."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileOptions:
    """Which files a process that serves HTTP reads."""

    config: Path | None = option(
        "A fleet file whose router, frontend, planes and log sections, and links, are used.", metavar="FILE"
    )
    model_paths: tuple[str, ...] = option(
        MODEL_PATH_HELP, default=(), flag="--model-path", metavar="MODEL=FOLDER"
    )


class RouterFiles(NamedTuple):
    """What a router takes of its flags, variables and files: the tokenizers are by model, and ``engines`` are
    those that the file names, for which other processes run workers.
    """

    settings: "Settings"
    sources: "Mapping[ModelName, str]"
    links: "LinkTable | None" = None
    engines: "Sequence[AttachSpec]" = ()


def router_settings(files: FileOptions, flags: Mapping[str, object]) -> RouterFiles:
    """Return a router's settings and files; print warnings about the links."""
    document, loaded = begun(flags, files.config)
    sources = model_sources(files.model_paths)
    from kvrouter.app.attach.spec import file_engines  # noqa: PLC0415
    from kvrouter.app.fleet_build import links_of  # noqa: PLC0415
    from kvrouter.fleetfile.fleet_checks import load_part  # noqa: PLC0415
    from kvrouter.fleetfile.link_table import link_warnings  # noqa: PLC0415

    links = None if document is None else links_of(document)
    warn(link_warnings(loaded.settings.router, links))
    engines: Sequence[AttachSpec] = ()
    if document is not None and "workers" in document.content:
        engines = [each.spec for each in file_engines(load_part(document))]
    return RouterFiles(loaded.settings, sources, links, engines)


def begin(loaded: "Loaded") -> None:
    """Report the settings' warnings and begin to log."""
    warn(loaded.warnings)
    log = loaded.settings.log
    begin_log(log.log_level.value, log.log_format.value)


def begin_log(level: str, log_format: str) -> None:
    """Log until the command ends; its last lines come before what it prints of an error."""
    from kvrouter.telemetry.logs import close_log, configure_logging  # noqa: PLC0415

    configure_logging(level, log_format=log_format)
    click.get_current_context().call_on_close(close_log)


def begun(flags: Mapping[str, object], file: Path | None = None) -> "tuple[Document | None, Loaded]":
    """Load the settings of flags, variables and ``file``, a fleet file or a part of one; report their
    warnings and begin to log. Returns the file, if there is one, and the settings; raises ConfigError.
    """
    from kvrouter.fleetfile.fleet_checks import settings_document  # noqa: PLC0415
    from kvrouter.settings.problems import read_document  # noqa: PLC0415
    from kvrouter.settings.sources import load_settings  # noqa: PLC0415

    document = None if file is None else settings_document(read_document(file))
    loaded = load_settings(flags=given_flags(flags), environ=os.environ, document=document)
    begin(loaded)
    return document, loaded


def warn(warnings: Iterable[str]) -> None:
    """Print warnings on standard error."""
    for warning in warnings:
        echo(f"kvrouter: warning: {warning}", err=True)


def model_sources(pairs: tuple[str, ...]) -> "dict[ModelName, str]":
    """Return the sources in ``--model-path``; raise ConfigError that names it."""
    from kvrouter.core.ids import ModelName  # noqa: PLC0415
    from kvrouter.text.source import checked_source  # noqa: PLC0415

    sources: dict[ModelName, str] = {}
    for pair in pairs:
        model, equals, folder = pair.partition("=")
        if not equals or not model or not folder:
            raise ConfigError(f"--model-path: must be MODEL=FOLDER, not {pair!r}", param="model_path")
        try:
            sources[ModelName(model)] = checked_source(folder)
        except ConfigError as error:
            raise ConfigError(f"--model-path: {error.message}", param="model_path") from error
    return sources

"""The commands that run one process of a fleet: frontend, worker, standalone router."""

import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvrouter.cli.flags import SettingsCommand, given_flags, setting_options
from kvrouter.cli.options import takes
from kvrouter.commands.options import StandaloneOptions
from kvrouter.commands.output import echo
from kvrouter.config.option import given_of, option
from kvrouter.config.worker_options import (
    EnginePods,
    MockEngineOptions,
    MockFileOptions,
    MockModelOptions,
    MockRunOptions,
    PlaceOptions,
    PodsRunOptions,
)
from kvrouter.core.errors import ConfigError

if TYPE_CHECKING:
    from kvrouter.config.problems import Document
    from kvrouter.config.sources import Loaded
    from kvrouter.config.tree import Settings
    from kvrouter.core.ids import ModelName
    from kvrouter.topology.links import LinkTable

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


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterFileOptions(FileOptions):
    """The same for a standalone router."""

    model_paths: tuple[str, ...] = option(
        f"{MODEL_PATH_HELP} Who sends token ids needs none.",
        default=(),
        flag="--model-path",
        metavar="MODEL=FOLDER",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticOptions:
    """Which workers a frontend has without discovery."""

    endpoints: tuple[str, ...] = option(
        "A worker without discovery, started with --static, whose log says what to write here. With any, "
        "nobody else is looked for. Not with --router-mode kv.",
        default=(),
        flag="--static-endpoint",
        metavar="ADDRESS,model=NAME[,…]",
    )


@click.command(cls=SettingsCommand, short_help="Serve workers that run in other processes.")
@takes(FileOptions, StaticOptions)
def frontend(files: FileOptions, static: StaticOptions, **flags: object) -> None:
    """Serve: an OpenAI-compatible endpoint in front of the workers that discovery finds.

    Run as many as you like, on any host: they know nothing of each other, but what --router-replica-sync
    tells. Workers and frontends of one fleet share --namespace, --discovery and --request-plane.
    """
    settings, sources, links = _router_of(files, flags)
    from kvrouter.commands.frontend import serve_frontend  # noqa: PLC0415
    from kvrouter.config.static_endpoint import static_cards  # noqa: PLC0415

    cards = static_cards(static.endpoints, settings.planes.request_plane)
    sys.exit(serve_frontend(settings, sources, links, cards))


def _router_of(
    files: FileOptions, flags: Mapping[str, object]
) -> "tuple[Settings, dict[ModelName, str], LinkTable | None]":
    """Return a router's settings, tokenizers and links; say what of the links is doubtful."""
    document, loaded = begun(flags, files.config)
    sources = model_sources(files.model_paths)
    from kvrouter.config.link_table import link_warnings  # noqa: PLC0415
    from kvrouter.wiring.fleet_build import links_of  # noqa: PLC0415

    links = None if document is None else links_of(document)
    warn(link_warnings(loaded.settings.router, links))
    return loaded.settings, sources, links


frontend.params.extend(setting_options("router", "frontend", "planes", "recording", "log"))


@click.group(short_help="Run a worker: an engine, and what makes it part of a fleet.")
def worker() -> None:
    """Run a worker: an engine, and next to it what serves requests, publishes KV events and says where it is.

    Where it is, it says by itself (--domain), or by the topology contract in its environment: see
    `kvrouter topology check`.
    """


@worker.command("mock", cls=SettingsCommand, short_help="An engine without a GPU.")
@takes(MockFileOptions, MockModelOptions, PlaceOptions, MockEngineOptions, MockRunOptions)
def worker_mock(
    which: MockFileOptions,
    model: MockModelOptions,
    place: PlaceOptions,
    engine: MockEngineOptions,
    run: MockRunOptions,
    **flags: object,
) -> None:
    """Run a mock engine: batching, cache and timing of a real one, without a GPU.

    It ends with exit code 1 when its place stays unknown under the topology contract, and with 3 when another
    start of its id took its place: let nothing start it again then, unless with --standby. After SIGTERM it
    takes no new legs and waits for those that run.
    """
    from kvrouter.config.fleet_checks import load_fleet  # noqa: PLC0415
    from kvrouter.config.one_worker import flag_of, fleet_of_one  # noqa: PLC0415

    said = {**given_of(model), **given_of(place), **given_of(engine)}
    document, loaded = begun(flags, which.fleet)
    if run.is_static and (run.engine_events is not None or run.enable_local_indexer):
        raise click.UsageError("--static: such a worker publishes no KV events")
    if run.is_static and run.is_standby:
        raise click.UsageError("--static: such a worker is announced nowhere, and has no place to wait for")
    if document is None:
        if which.group is not None or which.index:
            raise click.UsageError("--group and --index are about the workers of --fleet")
        of_fleet = fleet_of_one(said)
        which = replace(which, group=of_fleet.workers[0].name)
    else:
        if said:
            given = ", ".join(flag_of(name) for name in said)
            raise click.UsageError(f"{given}: the fleet file says so already")
        of_fleet = load_fleet(document).fleet
    from kvrouter.commands.mock_worker import MockWorkerSpec, serve_mock_worker  # noqa: PLC0415

    spec = MockWorkerSpec.pick(of_fleet, which, run)
    sys.exit(serve_mock_worker(loaded.settings, spec, os.environ, drain_limit_s=run.drain_limit_s))


worker_mock.params.extend(setting_options("planes", "log"))


def begin(loaded: "Loaded") -> None:
    """Report the settings' warnings and begin to log."""
    from kvrouter.telemetry.logs import configure_logging  # noqa: PLC0415

    warn(loaded.warnings)
    log = loaded.settings.log
    configure_logging(log.log_level.value, log_format=log.log_format.value)


def begun(flags: Mapping[str, object], file: Path | None = None) -> "tuple[Document | None, Loaded]":
    """Load the settings of flags, variables and ``file``, a fleet file or a part of one; report their
    warnings and begin to log. Returns the file, where there is one, and the settings; raises ConfigError.
    """
    from kvrouter.config.fleet_checks import settings_document  # noqa: PLC0415
    from kvrouter.config.problems import read_document  # noqa: PLC0415
    from kvrouter.config.sources import load_settings  # noqa: PLC0415

    document = None if file is None else settings_document(read_document(file))
    loaded = load_settings(flags=given_flags(flags), environ=os.environ, document=document)
    begin(loaded)
    return document, loaded


def warn(warnings: Iterable[str]) -> None:
    """Print warnings on standard error."""
    for warning in warnings:
        echo(f"kvrouter: warning: {warning}", err=True)


def model_sources(pairs: tuple[str, ...]) -> "dict[ModelName, str]":
    """What ``--model-path`` says; raise ConfigError that names it."""
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


@click.command(
    "pods", cls=SettingsCommand, short_help="Workers for the engines in labelled pods of Kubernetes."
)
@takes(EnginePods, PodsRunOptions)
def worker_pods(pods: EnginePods, run: PodsRunOptions, **flags: object) -> None:
    """Make every pod with the label kvrouter.dev/engine part of a fleet; its image and command stay as they
    are. What the engine cannot be asked is said in the pod's annotations.

    Of several such processes one serves each engine, and another takes over when that one ends.
    """
    _, loaded = begun(flags)
    from kvrouter.commands.engine_pods import serve_pod_workers  # noqa: PLC0415

    sys.exit(serve_pod_workers(loaded.settings, pods, os.environ, drain_limit_s=run.drain_limit_s))


worker_pods.params.extend(setting_options("planes", "log"))


@click.command(cls=SettingsCommand, short_help="Decide for engines that something else fronts.")
@takes(StandaloneOptions, RouterFileOptions)
def router(options: StandaloneOptions, files: RouterFileOptions, **flags: object) -> None:
    """Serve decisions over HTTP, for engines that something else fronts.

    POST /v1/route says which worker a request should go to, and books it there until its owner frees it.
    With --component prefill, POST /v1/prefill also sends the prefill leg, and answers with where the KV
    waits and what decode must obey. Requests themselves go elsewhere.

    It finds workers as a frontend does: they share --namespace, --discovery and --request-plane.
    """
    settings, sources, links = _router_of(files, flags)
    from kvrouter.commands.router import serve_standalone  # noqa: PLC0415

    sys.exit(serve_standalone(settings, options, sources, links))


router.params.extend(setting_options("router", "frontend", "planes", "log"))

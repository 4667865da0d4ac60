"""The command line of ``kvrouter up``: its options and its help."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import click

from kvrouter.cli.options import takes
from kvrouter.cli.process_settings import begin, begun, model_sources, warn
from kvrouter.cli.setting_flags import FIRST_TO_SERVE, SettingsCommand, given_flags, setting_options
from kvrouter.fleetfile.worker_options import EnginePods, EngineUrls
from kvrouter.settings.option import option
from kvrouter.settings.variables import FLEET_VARIABLE

NO_DISCOVERY = "kvrouter up discovers no workers: give it to kvrouter frontend"


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    """Which fleet is run, and as how many processes."""

    fleet: Path | None = option(
        f"The fleet to run.  [{FLEET_VARIABLE}; default: two zones, kept apart, of three workers each]",
        metavar="FILE",
    )
    replicas: int = option(
        "Frontends, on ports from --http-port on; with more than one every worker is a process too.",
        default=1,
        at_least=1,
        at_most=64,
    )
    nats: bool = option("A process each, over NATS; one is started where none runs.", default=False)
    events: Path | None = option(
        "What happens to the links between mock engines meanwhile, in YAML, as in `kvrouter replay`; links "
        "alone. Seconds count from when it is ready, on the mock engines' clock: `speedup` of the fleet file "
        "has them pass so many times as fast.",
        metavar="FILE",
    )
    engine_pods: str | None = option(
        "Instead of a fleet file: serve the engines of this namespace's pods that have the label "
        "kvrouter.dev/engine, and these labels too, as team=a,tier!=test.",
        metavar="[SELECTOR]",
        alone="",
    )
    engine_namespace: str | None = option("Another namespace than this pod's own.", metavar="NAME")
    model_paths: tuple[str, ...] = option(
        "A model's tokenizer: this host's folder, a Hugging Face repository, or engine; with --url or "
        "--engine-pods.",
        default=(),
        flag="--model-path",
        metavar="MODEL=FOLDER",
    )

    @property
    def takes_many_processes(self) -> bool:
        """Whether every frontend and worker is a separate process."""
        return self.replicas > 1 or self.nats


@click.command(cls=SettingsCommand, short_help="Serve a fleet.")
@takes(EngineUrls, UpOptions)
def up(engines: EngineUrls, options: UpOptions, **flags: object) -> None:
    """Serve: an OpenAI-compatible endpoint in front of a fleet of workers.

    \b
    kvrouter up                                       mock engines: a fleet to look at
    kvrouter up --engine vllm --url http://10.0.1.1:8000 --url http://10.0.1.2:8000
    kvrouter up --fleet fleet.yaml                    what `kvrouter fleet init` writes

    Engines at --url are asked for their model, tokenizer, block size and KV events; one that is not up yet is
    awaited. A key that they ask for is read from KVROUTER_ENGINE_API_KEY.

    Everything runs in this process, unless --replicas or --nats asks for many.

    A flag wins over its variable, the variable over the fleet file, the file over the default.
    """
    _refuse_two_fleets(engines, options)
    if options.events is not None and options.takes_many_processes:
        raise click.UsageError("--events: not with --replicas or --nats")
    if options.engine_pods is not None:
        if options.events is not None:
            raise click.UsageError("--events: not with --engine-pods, which have no mock engines")
        if options.fleet is not None or options.takes_many_processes:
            raise click.UsageError("--engine-pods: not with --fleet, --replicas or --nats")
        _serve_engine_pods(
            EnginePods(selector=options.engine_pods, namespace=options.engine_namespace),
            options.model_paths,
            flags,
        )
    if options.engine_namespace is not None:
        raise click.UsageError("--engine-namespace: only with --engine-pods")
    if options.model_paths and not _is_of_urls(engines):
        raise click.UsageError("--model-path: only with --url or --engine-pods")
    from kvrouter.fleetfile.fleet_checks import (  # noqa: PLC0415
        default_fleet_document,
        default_fleet_path,
        load_fleet,
        settled,
    )
    from kvrouter.settings.planes import refuse_clusters  # noqa: PLC0415
    from kvrouter.settings.problems import dotted, read_document  # noqa: PLC0415
    from kvrouter.settings.sources import load_settings  # noqa: PLC0415

    file = None if _is_of_urls(engines) else _fleet_file(options.fleet)
    if _is_of_urls(engines):
        from kvrouter.cli.fleet.template import url_document  # noqa: PLC0415

        document = url_document(engines)
    else:
        document = default_fleet_document() if file is None else read_document(file)
    of_file = load_fleet(document).fleet
    loaded = load_settings(flags=given_flags(flags), environ=os.environ, document=document)
    refuse_clusters(loaded.settings.planes, NO_DISCOVERY)
    settled_fleet = settled(of_file, loaded.settings)
    begin(loaded)
    warn(settled_fleet.warnings)
    if loaded.settings.router.replica_sync and not options.takes_many_processes:
        warn(
            ["router.replica_sync has no effect in one process: it is between frontends, as --replicas runs"]
        )
    if options.takes_many_processes:
        from kvrouter.cli.up.multi_process import serve_processes  # noqa: PLC0415

        file = file or default_fleet_path()
        sys.exit(
            serve_processes(
                loaded.settings, settled_fleet.fleet, file, replicas=options.replicas, with_nats=options.nats
            )
        )
    from kvrouter.cli.up.run import serve  # noqa: PLC0415

    sources = model_sources(options.model_paths)
    place = document.place if _is_of_urls(engines) else dotted
    sys.exit(serve(loaded.settings, settled_fleet.fleet, options.events, sources, place))


up.params.extend(setting_options(first=FIRST_TO_SERVE))


def _is_of_urls(engines: EngineUrls) -> bool:
    return engines != EngineUrls()


def _refuse_two_fleets(engines: EngineUrls, options: UpOptions) -> None:
    """Raise UsageError for flags that name two fleets."""
    if not _is_of_urls(engines):
        return
    flag = "--url" if engines.urls else "--engine"
    if options.fleet is not None:
        raise click.UsageError(f"{flag}: not with --fleet, whose file names the engines")
    if options.engine_pods is not None:
        raise click.UsageError(f"{flag}: not with --engine-pods, which finds engines by their pods' labels")
    if options.takes_many_processes:
        raise click.UsageError(
            f"{flag}: not with --replicas or --nats: write a fleet file for those, by kvrouter fleet init "
            "with the same --engine and --url"
        )


def _serve_engine_pods(
    pods: EnginePods, model_paths: tuple[str, ...], flags: Mapping[str, object]
) -> NoReturn:
    from kvrouter.cli.worker.engine_pods import serve_engine_pods  # noqa: PLC0415
    from kvrouter.settings.planes import refuse_clusters  # noqa: PLC0415

    _, loaded = begun(flags)
    refuse_clusters(loaded.settings.planes, NO_DISCOVERY)
    sys.exit(serve_engine_pods(loaded.settings, pods, model_sources(model_paths), os.environ))


def _fleet_file(fleet: Path | None) -> Path | None:
    named = fleet or os.environ.get(FLEET_VARIABLE, "").strip()
    return Path(named) if named else None

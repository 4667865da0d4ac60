"""``kvrouter up``."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

import click

from kvrouter.cli.flags import SettingsCommand, given_flags, setting_options
from kvrouter.cli.processes import begin, begun, model_sources, warn
from kvrouter.config.setting_spec import SettingValue
from kvrouter.config.variables import FLEET_VARIABLE

NO_DISCOVERY = "kvrouter up discovers no workers: give it to kvrouter frontend"


@click.command(cls=SettingsCommand, short_help="Serve a fleet.")
@click.option(
    "--fleet",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help=f"The fleet to run.  [{FLEET_VARIABLE}; default: two zones, kept apart, of three workers each]",
)
@click.option(
    "--replicas",
    type=click.IntRange(1, 64),
    default=1,
    show_default=True,
    help="Frontends, on ports from --http-port on; with more than one every worker is a process too.",
)
@click.option(
    "--nats", "with_nats", is_flag=True, help="A process each, over NATS; one is started where none runs."
)
@click.option(
    "--events",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="What happens to the links between mock engines meanwhile, in YAML, as in `kvrouter replay`; links "
    "alone. Seconds count from when it is ready, on the mock engines' clock: `speedup` of the fleet file has "
    "them pass so many times as fast.",
)
@click.option(
    "--engine-pods",
    "selector",
    is_flag=False,
    flag_value="",
    metavar="[SELECTOR]",
    help="Instead of a fleet file: serve the engines of this namespace's pods that have the label "
    "kvrouter.dev/engine, and these labels too, as team=a,tier!=test.",
)
@click.option("--engine-namespace", metavar="NAME", help="Another namespace than this pod's own.")
@click.option(
    "--model-path",
    "model_paths",
    multiple=True,
    metavar="MODEL=FOLDER",
    help="A model's tokenizer: this host's folder, a Hugging Face repository, or engine; with --engine-pods.",
)
def up(
    fleet: Path | None,
    replicas: int,
    with_nats: bool,
    events: Path | None,
    selector: str | None,
    engine_namespace: str | None,
    model_paths: tuple[str, ...],
    **flags: SettingValue | None,
) -> None:
    """Serve: an OpenAI-compatible endpoint in front of a fleet of workers.

    Everything runs in this process, unless --replicas or --nats asks for many.

    A flag wins over its variable, the variable over the fleet file, the file over the default.
    """
    if events is not None and (replicas > 1 or with_nats):
        raise click.UsageError("--events: not with --replicas or --nats")
    if selector is not None:
        if events is not None:
            raise click.UsageError("--events: not with --engine-pods, which have no mock engines")
        if fleet is not None or replicas > 1 or with_nats:
            raise click.UsageError("--engine-pods: not with --fleet, --replicas or --nats")
        _serve_engine_pods(selector, engine_namespace, model_paths, flags)
    if engine_namespace is not None or model_paths:
        raise click.UsageError("--engine-namespace and --model-path: only with --engine-pods")
    from kvrouter.config.fleet_checks import (  # noqa: PLC0415
        default_fleet_document,
        default_fleet_path,
        load_fleet,
        settled,
    )
    from kvrouter.config.planes import refuse_clusters  # noqa: PLC0415
    from kvrouter.config.problems import read_document  # noqa: PLC0415
    from kvrouter.config.sources import load_settings  # noqa: PLC0415

    file = _fleet_file(fleet)
    document = default_fleet_document() if file is None else read_document(file)
    of_file = load_fleet(document).fleet
    loaded = load_settings(flags=given_flags(flags), environ=os.environ, document=document)
    refuse_clusters(loaded.settings.planes, NO_DISCOVERY)
    settled_fleet = settled(of_file, loaded.settings)
    begin(loaded)
    warn(settled_fleet.warnings)
    if replicas > 1 or with_nats:
        from kvrouter.commands.multi_process import serve_processes  # noqa: PLC0415

        file = file or default_fleet_path()
        sys.exit(
            serve_processes(
                loaded.settings, settled_fleet.fleet, file, replicas=replicas, with_nats=with_nats
            )
        )
    from kvrouter.commands.up import serve  # noqa: PLC0415

    sys.exit(serve(loaded.settings, settled_fleet.fleet, events))


up.params.extend(setting_options())


def _serve_engine_pods(
    selector: str,
    namespace: str | None,
    model_paths: tuple[str, ...],
    flags: Mapping[str, SettingValue | None],
) -> NoReturn:
    from kvrouter.attach.pod_fleet import EnginePods  # noqa: PLC0415
    from kvrouter.commands.engine_pods import serve_engine_pods  # noqa: PLC0415
    from kvrouter.config.planes import refuse_clusters  # noqa: PLC0415

    _, loaded = begun(flags)
    refuse_clusters(loaded.settings.planes, NO_DISCOVERY)
    pods = EnginePods(selector=selector, namespace=namespace)
    sys.exit(serve_engine_pods(loaded.settings, pods, model_sources(model_paths), os.environ))


def _fleet_file(fleet: Path | None) -> Path | None:
    named = fleet or os.environ.get(FLEET_VARIABLE, "").strip()
    return Path(named) if named else None

"""``kvrouter worker`` (mock, each kind of engine, pods) and ``kvrouter topology``: options and messages."""

import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import click

from kvrouter.cli.options import takes
from kvrouter.cli.output import Output, echo, json_text
from kvrouter.cli.process_settings import begun
from kvrouter.cli.setting_flags import SettingsCommand, output_option, setting_options
from kvrouter.cli.worker.options import (
    AttachOptions,
    AttachRunOptions,
    ComponentOptions,
    MockFileOptions,
    MockRunOptions,
    PodsRunOptions,
)
from kvrouter.core.errors import ConfigError
from kvrouter.engines.registry import ENGINES, help_of
from kvrouter.fleetfile.worker_options import EnginePods, MockEngineOptions, MockModelOptions, PlaceOptions
from kvrouter.settings.option import given_of
from kvrouter.settings.variables import ENGINE_KEY_VARIABLE
from kvrouter.text.source import ENGINE_TOKENIZER, is_repository

if TYPE_CHECKING:
    from kvrouter.engines.attach import AttachSpec


@click.group(short_help="Run a worker: an engine, and what makes it part of a fleet.")
def worker() -> None:
    """Run a worker: an engine, and next to it what serves requests, publishes KV events and says where it is.

    Where it is, it says by itself (--domain), or by the topology contract in its environment: see
    `kvrouter topology check`.
    """


@worker.command("mock", cls=SettingsCommand, short_help="An engine without a GPU.")
@takes(MockFileOptions, ComponentOptions, MockModelOptions, PlaceOptions, MockEngineOptions, MockRunOptions)
def worker_mock(
    file_options: MockFileOptions,
    component: ComponentOptions,
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
    from kvrouter.fleetfile.fleet_checks import load_fleet  # noqa: PLC0415
    from kvrouter.fleetfile.one_worker import flag_of, fleet_of_one  # noqa: PLC0415

    given = {**given_of(model), **given_of(place), **given_of(engine)}
    document, loaded = begun(flags, file_options.fleet)
    if run.is_static and (run.engine_events is not None or run.enable_local_indexer):
        raise click.UsageError("--static: such a worker publishes no KV events")
    if run.is_static and run.is_standby:
        raise click.UsageError("--static: such a worker is announced nowhere, and has no place to wait for")
    if document is None:
        if file_options.group is not None or file_options.index:
            raise click.UsageError("--group and --index are about the workers of --fleet")
        of_fleet = fleet_of_one(given)
        file_options = replace(file_options, group=of_fleet.workers[0].name)
    else:
        if given:
            names = ", ".join(flag_of(name) for name in given)
            raise click.UsageError(f"{names}: the fleet file says so already")
        of_fleet = load_fleet(document).fleet
    from kvrouter.cli.worker.mock_worker import MockWorkerSpec, serve_mock_worker  # noqa: PLC0415

    spec = MockWorkerSpec.pick(of_fleet, file_options, run, component=component.checked)
    sys.exit(serve_mock_worker(loaded.settings, spec, os.environ, drain_limit_s=run.drain_limit_s))


worker_mock.params.extend(setting_options("planes", "log"))


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
    from kvrouter.cli.worker.engine_pods import serve_pod_workers  # noqa: PLC0415

    sys.exit(serve_pod_workers(loaded.settings, pods, os.environ, drain_limit_s=run.drain_limit_s))


worker_pods.params.extend(setting_options("planes", "log"))


_CONTRADICTED = (
    "url",
    "model",
    "tokenizer",
    "role",
    "block_size",
    "context_length",
    "kv_events",
    "kv_events_replay",
)
"""The options that an engine may contradict."""

_WHICH = ("fleet", "group", "index", "worker_id")
"""The options that a worker of a fleet file has too."""


def _engine_command(kind: str) -> click.Command:
    texts = help_of(kind)

    @takes(AttachOptions, ComponentOptions, PlaceOptions, AttachRunOptions)
    def serve(
        engine: AttachOptions,
        component: ComponentOptions,
        place: PlaceOptions,
        run: AttachRunOptions,
        **flags: object,
    ) -> None:
        _serve(kind, engine, component, place, run, flags)

    command = click.command(kind, cls=SettingsCommand, short_help=texts.short, help=texts.text)(serve)
    command.params.extend(setting_options("planes", "log"))
    return command


def _serve(
    kind: str,
    engine: AttachOptions,
    component: ComponentOptions,
    place: PlaceOptions,
    run: AttachRunOptions,
    flags: Mapping[str, object],
) -> None:
    document, loaded = begun(flags, engine.fleet)
    from kvrouter.app.attach.spec import file_engines, pick_engine, worker_environ  # noqa: PLC0415
    from kvrouter.cli.worker.engine_worker import serve_engine_worker  # noqa: PLC0415
    from kvrouter.fleetfile.fleet_checks import load_fleet  # noqa: PLC0415
    from kvrouter.fleetfile.one_worker import flag_of, worker_id_of  # noqa: PLC0415

    environ: Mapping[str, str] = os.environ
    if document is None:
        if engine.group is not None or engine.index:
            raise click.UsageError("--group and --index are about the engines of --fleet")
        spec = _spec_of_flags(kind, engine, place)
    else:
        given_names = [name for name in (*given_of(engine), *given_of(place)) if name not in _WHICH]
        if given_names:
            given = ", ".join(map(flag_of, given_names))
            raise click.UsageError(f"{given}: the fleet file says so already")
        of_file = load_fleet(document).fleet
        engines = file_engines(of_file)
        picked = pick_engine(engines, kind, group=engine.group, index=engine.index)
        spec = picked.with_key(os.environ)
        if engine.worker_id is not None:
            spec = replace(spec, worker_id=worker_id_of(engine.worker_id))
        environ = worker_environ(picked.group, os.environ)
    spec = replace(
        spec,
        component=component.checked,
        wait_s=run.engine_wait_s,
        enable_local_indexer=run.enable_local_indexer,
        is_standby=run.is_standby,
    )
    sys.exit(serve_engine_worker(loaded.settings, spec, environ, drain_limit_s=run.drain_limit_s))


def _spec_of_flags(kind: str, engine: AttachOptions, place: PlaceOptions) -> "AttachSpec":
    from kvrouter.core.secret import secret_variable  # noqa: PLC0415
    from kvrouter.engines.attach import AttachSpec  # noqa: PLC0415
    from kvrouter.fleetfile.fleet_workers import placed_config  # noqa: PLC0415
    from kvrouter.fleetfile.one_worker import flag_of, fleet_of_one, worker_id_of  # noqa: PLC0415

    role = {} if engine.role is None else {"role": engine.role}
    of_fleet = fleet_of_one({**role, **given_of(place)})
    engine_key = secret_variable(os.environ, ENGINE_KEY_VARIABLE)
    worker_id = worker_id_of(engine.worker_id)
    if engine.url is None:
        raise click.UsageError("--url: is required, unless --fleet names a file")
    if engine.kv_events_replay is not None and engine.kv_events is None:
        raise click.UsageError("--kv-events-replay: only together with --kv-events")
    if engine.no_kv_events and engine.kv_events is not None:
        raise click.UsageError("--no-kv-events and --kv-events contradict each other")
    (group,) = of_fleet.workers
    return AttachSpec(
        kind=kind,
        url=_checked_url(engine.url),
        worker_id=worker_id,
        role=group.role,
        model=engine.model,
        tokenizer=None if engine.tokenizer is None else _checked_tokenizer(engine.tokenizer),
        block_size=engine.block_size,
        context_length=engine.context_length,
        kv_events=engine.kv_events,
        kv_events_replay=engine.kv_events_replay,
        publishes_kv_events=not engine.no_kv_events,
        api_key=engine_key,
        key_at=ENGINE_KEY_VARIABLE,
        runtime_config=placed_config(of_fleet, group),
        fields_at={name: flag_of(name) for name in _CONTRADICTED},
    )


def _checked_tokenizer(tokenizer: str) -> str:
    if not (tokenizer == ENGINE_TOKENIZER or is_repository(tokenizer) or Path(tokenizer).is_dir()):
        raise ConfigError(
            f"--tokenizer: {tokenizer} is no folder here, nor the name of a repository, nor engine",
            param="tokenizer",
        )
    return tokenizer


def _checked_url(url: str) -> str:
    from kvrouter.fleetfile.fleet_engines import url_mistake  # noqa: PLC0415
    from kvrouter.settings.problems import without_password  # noqa: PLC0415

    mistake = url_mistake(url)
    if mistake is not None:
        raise ConfigError(f"--url: {mistake}, not {without_password(repr(url))}", param="url")
    return url


ENGINE_COMMANDS = tuple(_engine_command(kind) for kind in ENGINES)
"""``kvrouter worker vllm`` and its like: one for each kind that is registered."""

for each in (*ENGINE_COMMANDS, worker_pods):
    worker.add_command(each)


TERMINATED = 128 + signal.SIGTERM


@click.group()
def topology() -> None:
    """Where a worker is."""


@topology.command("check")
@output_option
def topology_check(output: Output) -> None:
    """Print what a worker would publish from its environment and label files, or why it would not start."""
    from kvrouter.worker.topology import topology_check as check  # noqa: PLC0415

    report = check(os.environ)
    output.show(lambda: json_text(report), lambda: echo(report.text))
    sys.exit(report.exit_code)


@topology.command("wait", short_help="Wait until the label files are there.")
@click.option(
    "--mount-path",
    metavar="FOLDER",
    help="The folder of the files.  [DYN_TOPOLOGY_MOUNT_PATH; default: /etc/dynamo/topology]",
)
@click.option(
    "--levels",
    metavar="LEVEL[,…]",
    help="The levels whose files must have a value.  [default: the one that a worker with this environment "
    "would wait for]",
)
@click.option(
    "--label",
    "labels",
    multiple=True,
    metavar="LEVEL=KEY",
    help="The pod label that a level's file shows, for messages about it.  [default: "
    "grove.io/topology.LEVEL]",
)
@click.option(
    "--timeout-s",
    type=click.FloatRange(min=0, max=86_400),
    default=300.0,
    show_default=True,
    help="How long to wait; 0 looks once.",
)
def topology_wait(
    mount_path: str | None, levels: str | None, labels: tuple[str, ...], timeout_s: float
) -> None:
    """Wait until every level's file has a value: the init container of a worker's pod.

    It ends with 0 once they have, and with 1 and the usual causes when they never do. Every few seconds it
    tells what it waits for.
    """
    from kvrouter.worker.topology import awaited, wait_for_levels  # noqa: PLC0415

    signal.signal(signal.SIGTERM, _end)
    wanted = awaited(os.environ, mount_path=mount_path, levels=levels, labels=labels)
    wait_for_levels(wanted, timeout_s=timeout_s, say=click.echo)


def _end(_number: int, _frame: FrameType | None) -> None:
    """A container's first process must handle SIGTERM itself to be ended by it."""
    sys.exit(TERMINATED)

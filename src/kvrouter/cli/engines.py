"""``kvrouter worker vllm``, ``sglang``, ``trtllm`` and ``kvrouter topology``: flags and messages."""

import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import click

from kvrouter.cli.flags import SettingsCommand, output_option, setting_options
from kvrouter.cli.processes import begun, described, place_options, worker, worker_pods
from kvrouter.commands.output import Output, echo, json_text
from kvrouter.config.variables import ENGINE_KEY_VARIABLE
from kvrouter.core.errors import ConfigError
from kvrouter.engines.registry import ENGINES, help_of
from kvrouter.text.source import ENGINE_TOKENIZER, is_repository

if TYPE_CHECKING:
    from kvrouter.config.fleet import FleetFile
    from kvrouter.core.ids import WorkerId
    from kvrouter.engines.attach import AttachSpec


_FILE_OPTIONS = (
    click.option(
        "--fleet",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Take the worker from a fleet file, instead of --url and what goes with it.",
    ),
    click.option("--group", metavar="NAME", help="The group of the fleet file; with --fleet."),
    click.option(
        "--index",
        type=int,
        default=0,
        show_default=True,
        help="Which engine of the group, from 0; with --fleet.",
    ),
)

_FLAGS_AT = {
    field: f"--{field.replace('_', '-')}"
    for field in (
        "url",
        "model",
        "tokenizer",
        "role",
        "block_size",
        "context_length",
        "kv_events",
        "kv_events_replay",
    )
}
"""The flag of what an engine may contradict: by the name of the field."""

_PLACE_FLAGS = ("role", "domain", "taint", "prompt_tokens_min", "prompt_tokens_max", "kv_transfer_domain",
                "kv_transfer_enforcement", "kv_transfer_preferred_weight")  # fmt: skip
"""What the flags say of the worker in the words of a fleet file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFlags:
    """What the flags say of the engine. A fleet file says all of it by itself."""

    url: str | None = None
    model: str | None = None
    tokenizer: str | None = None
    block_size: int | None = None
    context_length: int | None = None
    kv_events: str | None = None
    kv_events_replay: str | None = None
    no_kv_events: bool = False


_ENGINE_FLAGS = tuple(field.name for field in fields(EngineFlags))


def _engine_command(kind: str) -> click.Command:
    texts = help_of(kind)
    options = [
        click.option("--url", metavar="URL", help="Its server, as http://127.0.0.1:8000."),
        *_FILE_OPTIONS,
        click.option(
            "--model", metavar="NAME", help="Which of the names that it serves.  [default: the first]"
        ),
        click.option(
            "--tokenizer",
            metavar="FOLDER|REPOSITORY",
            help="The model's tokenizer: a folder, for frontends on this host, or a Hugging Face repository, "
            "or engine, which has its engine tokenize.  [default: the engine's own]",
        ),
        click.option("--role", metavar="prefill|decode|both", help="Which legs it serves.  [default: both]"),
        click.option("--worker-id", type=int, metavar="INT", help="Its id in the fleet.  [default: random]"),
        click.option(
            "--block-size", type=int, metavar="INT", help="What its KV blocks must have.  [default: asked]"
        ),
        click.option(
            "--context-length",
            type=click.IntRange(min=1),
            metavar="INT",
            help="Tokens of prompt and answer together; at most the engine's own.  [default: asked]",
        ),
        click.option(
            "--kv-events",
            metavar="ADDRESS",
            help="Where rank 0 publishes its KV events, tcp://HOST:PORT.  [default: asked]",
        ),
        click.option(
            "--kv-events-replay",
            metavar="ADDRESS",
            help="Where rank 0 replays them; with --kv-events.  [default: asked]",
        ),
        click.option("--no-kv-events", is_flag=True, help="Do not listen to its KV events."),
        place_options,
        click.option(
            "--enable-local-indexer",
            is_flag=True,
            help="Answer routers that missed KV events, which then travel over NATS Core, not JetStream.",
        ),
        click.option(
            "--standby", "is_standby", is_flag=True, help="Wait until no other start of its id serves."
        ),
        click.option(
            "--engine-wait-s",
            type=click.FloatRange(min=0, max=86_400),
            default=600.0,
            show_default=True,
            help="How long the engine may take to answer: it loads its model first.",
        ),
        click.option(
            "--drain-limit-s",
            type=float,
            default=30.0,
            show_default=True,
            help="Time for running legs at the end.",
        ),
    ]

    def serve(**flags: object) -> None:
        _serve(kind, **flags)  # type: ignore[arg-type]  # click checked them

    for option in reversed(options):
        serve = option(serve)
    command = click.command(kind, cls=SettingsCommand, short_help=texts.short, help=texts.text)(serve)
    command.params.extend(setting_options("planes", "log"))
    return command


def _serve(
    kind: str,
    *,
    fleet: Path | None,
    group: str | None,
    index: int,
    worker_id: int | None,
    enable_local_indexer: bool,
    is_standby: bool,
    engine_wait_s: float,
    drain_limit_s: float,
    **flags: object,
) -> None:
    said = described({name: flags.pop(name) for name in (*_ENGINE_FLAGS, *_PLACE_FLAGS)})
    if not said["no_kv_events"]:
        del said["no_kv_events"]
    document, loaded = begun(flags, fleet)
    from kvrouter.attach.spec import file_engines, pick_engine, worker_environ  # noqa: PLC0415
    from kvrouter.commands.engine_worker import serve_engine_worker  # noqa: PLC0415
    from kvrouter.config.fleet_checks import load_fleet  # noqa: PLC0415
    from kvrouter.config.one_worker import flag_of, fleet_of_one, worker_id_of  # noqa: PLC0415
    from kvrouter.core.secret import secret_variable  # noqa: PLC0415

    environ: Mapping[str, str] = os.environ
    if document is None:
        if group is not None or index:
            raise click.UsageError("--group and --index are about the engines of --fleet")
        engine = EngineFlags(**{name: said.pop(name) for name in _ENGINE_FLAGS if name in said})  # type: ignore[arg-type]  # click checked them
        spec = _spec_of_flags(
            kind,
            engine,
            fleet_of_one(said),
            engine_key=secret_variable(os.environ, ENGINE_KEY_VARIABLE),
            worker_id=worker_id_of(worker_id),
        )
    else:
        if said:
            given = ", ".join(flag_of(name) for name in said)
            raise click.UsageError(f"{given}: the fleet file says so already")
        of_file = load_fleet(document).fleet
        engines = file_engines(of_file)
        picked = pick_engine(engines, kind, group=group, index=index)
        spec = picked.with_key(os.environ)
        if worker_id is not None:
            spec = replace(spec, worker_id=worker_id_of(worker_id))
        environ = worker_environ(picked.group, os.environ)
    spec = replace(
        spec,
        wait_s=engine_wait_s,
        enable_local_indexer=enable_local_indexer,
        is_standby=is_standby,
    )
    sys.exit(serve_engine_worker(loaded.settings, spec, environ, drain_limit_s=drain_limit_s))


def _spec_of_flags(
    kind: str, engine: EngineFlags, place: "FleetFile", *, engine_key: str | None, worker_id: "WorkerId"
) -> "AttachSpec":
    from kvrouter.config.fleet_workers import placed_config  # noqa: PLC0415
    from kvrouter.engines.attach import AttachSpec  # noqa: PLC0415

    if engine.url is None:
        raise click.UsageError("--url: is required, unless --fleet names a file")
    if engine.kv_events_replay is not None and engine.kv_events is None:
        raise click.UsageError("--kv-events-replay: only together with --kv-events")
    if engine.no_kv_events and engine.kv_events is not None:
        raise click.UsageError("--no-kv-events and --kv-events contradict each other")
    (group,) = place.workers
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
        runtime_config=placed_config(place, group),
        fields_at=_FLAGS_AT,
    )


def _checked_tokenizer(tokenizer: str) -> str:
    if not (tokenizer == ENGINE_TOKENIZER or is_repository(tokenizer) or Path(tokenizer).is_dir()):
        raise ConfigError(
            f"--tokenizer: {tokenizer} is no folder here, nor the name of a repository, nor engine",
            param="tokenizer",
        )
    return tokenizer


def _checked_url(url: str) -> str:
    from kvrouter.config.fleet_engines import url_mistake  # noqa: PLC0415
    from kvrouter.config.problems import without_password  # noqa: PLC0415

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
    """A container's first process is not ended by SIGTERM unless it says so itself."""
    sys.exit(TERMINATED)

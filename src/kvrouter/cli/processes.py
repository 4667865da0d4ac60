"""The commands that run one process of a fleet: frontend, worker, standalone router."""

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from kvrouter.cli.flags import SettingsCommand, given_flags, setting_options
from kvrouter.commands.output import echo
from kvrouter.config.setting_spec import SettingValue
from kvrouter.core.errors import ConfigError

if TYPE_CHECKING:
    from kvrouter.config.problems import Document
    from kvrouter.config.sources import Loaded
    from kvrouter.core.ids import ModelName

Command = TypeVar("Command", bound=Callable[..., object])

_OPTIONS = (
    click.option(
        "--domain",
        multiple=True,
        metavar="LEVEL=VALUE",
        help="Where it is, the broadest level first: --domain zone=a --domain rack=r7.",
    ),
    click.option("--taint", multiple=True, metavar="TEXT", help="A taint of its own; may be repeated."),
    click.option(
        "--prompt-tokens-min", type=int, metavar="INT", help="The shortest prompt that it prefills."
    ),
    click.option("--prompt-tokens-max", type=int, metavar="INT", help="The longest prompt that it prefills."),
    click.option("--kv-transfer-domain", metavar="LEVEL", help="The domain that its KV transfers keep to."),
    click.option(
        "--kv-transfer-enforcement",
        metavar="required|preferred|fallback",
        help="How strictly.  [default: required]",
    ),
    click.option("--kv-transfer-preferred-weight", type=float, metavar="NUMBER", help="From 0 to 1."),
)


def place_options(command: Command) -> Command:
    """Give ``command`` the flags ``--domain``, ``--taint``, ``--prompt-tokens-…`` and ``--kv-transfer-…``."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@click.command(cls=SettingsCommand, short_help="Serve workers that run in other processes.")
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="A fleet file whose router, frontend, planes and log sections, and links, are used.",
)
@click.option(
    "--model-path",
    "model_paths",
    multiple=True,
    metavar="MODEL=FOLDER",
    help="A model's tokenizer: this host's folder, a Hugging Face repository, or engine; without it what its "
    "workers name is read.",
)
@click.option(
    "--static-endpoint",
    "static_endpoints",
    multiple=True,
    metavar="ADDRESS,model=NAME[,…]",
    help="A worker without discovery, started with --static, whose log says what to write here. With any, "
    "nobody else is looked for. Not with --router-mode kv.",
)
def frontend(
    config: Path | None,
    model_paths: tuple[str, ...],
    static_endpoints: tuple[str, ...],
    **flags: SettingValue | None,
) -> None:
    """Serve: an OpenAI-compatible endpoint in front of the workers that discovery finds.

    Run as many as you like, on any host: they know nothing of each other, but what --router-replica-sync
    tells. Workers and frontends of one fleet share --namespace, --discovery and --request-plane.
    """
    document, loaded = begun(flags, config)
    sources = model_sources(model_paths)
    from kvrouter.commands.frontend import serve_frontend  # noqa: PLC0415
    from kvrouter.config.link_table import link_warnings  # noqa: PLC0415
    from kvrouter.config.static_endpoint import static_cards  # noqa: PLC0415
    from kvrouter.wiring.fleet_build import links_of  # noqa: PLC0415

    links = None if document is None else links_of(document)
    warn(link_warnings(loaded.settings.router, links))
    static = static_cards(static_endpoints, loaded.settings.planes.request_plane)
    sys.exit(serve_frontend(loaded.settings, sources, links, static))


frontend.params.extend(setting_options("router", "frontend", "planes", "recording", "log"))


@click.group(short_help="Run a worker: an engine, and what makes it part of a fleet.")
def worker() -> None:
    """Run a worker: an engine, and next to it what serves requests, publishes KV events and says where it is.

    Where it is, it says by itself (--domain), or by the topology contract in its environment: see
    `kvrouter topology check`.
    """


@worker.command("mock", cls=SettingsCommand, short_help="An engine without a GPU.")
@click.option(
    "--fleet", type=click.Path(path_type=Path), metavar="FILE", help="Take the worker from a fleet file."
)
@click.option("--group", metavar="NAME", help="The group of the fleet file; with --fleet.")
@click.option(
    "--index", type=int, default=0, show_default=True, help="Which worker of the group, from 0; with --fleet."
)
@click.option("--worker-id", type=int, metavar="INT", help="Its id in the fleet.  [default: random]")
@click.option("--model", metavar="NAME", help="The model that it serves.  [default: mock]")
@click.option("--tokenizer", metavar="FOLDER|REPOSITORY", help="The model's tokenizer.  [default: mock]")
@click.option("--role", metavar="prefill|decode|both", help="Which legs it serves.  [default: both]")
@click.option("--block-size", type=int, metavar="INT", help="Tokens in a KV block.  [default: 64]")
@click.option("--context-length", type=int, metavar="INT", help="Prompt and answer.  [default: 32768 tokens]")
@click.option("--dp-size", type=int, metavar="INT", help="Data-parallel ranks.  [default: 1]")
@place_options
@click.option("--total-kv-blocks", type=int, metavar="INT", help="KV blocks of a rank.  [default: 16384]")
@click.option("--max-num-seqs", type=int, metavar="INT", help="Sequences in a batch.  [default: 256]")
@click.option("--max-num-batched-tokens", type=int, metavar="INT", help="Tokens in a step.  [default: 8192]")
@click.option("--handoff", metavar="bootstrap|synchronous", help="How KV is handed on.  [default: bootstrap]")
@click.option("--kv-load-failure-policy", metavar="fail|recompute", help="What to do without KV.")
@click.option("--kv-events/--no-kv-events", default=None, help="Publish KV events.  [default: yes]")
@click.option("--speedup", type=float, metavar="NUMBER", help="Times faster than life.  [default: 1]")
@click.option("--seed", type=int, metavar="INT", help="What its tokens are drawn from.  [default: 0]")
@click.option(
    "--enable-local-indexer",
    is_flag=True,
    help="Answer routers that missed KV events, which then travel over NATS Core instead of JetStream.",
)
@click.option(
    "--engine-events",
    metavar="ADDRESS",
    help="Where an engine of your own tells its KV events, unix:PATH or tcp://HOST:PORT; the mock answers.",
)
@click.option(
    "--static",
    "is_static",
    is_flag=True,
    help="Be announced nowhere and publish no KV events: frontends name this worker by --static-endpoint.",
)
@click.option(
    "--standby",
    "is_standby",
    is_flag=True,
    help="Begin once no other worker of this id is announced; without it the newer start takes the place.",
)
@click.option(
    "--drain-limit-s", type=float, default=30.0, show_default=True, help="Time for running legs at the end."
)
def worker_mock(
    fleet: Path | None,
    group: str | None,
    index: int,
    worker_id: int | None,
    enable_local_indexer: bool,
    engine_events: str | None,
    is_static: bool,
    is_standby: bool,
    drain_limit_s: float,
    **flags: object,
) -> None:
    """Run a mock engine: batching, cache and timing of a real one, without a GPU.

    It ends with exit code 1 when its place stays unknown under the topology contract, and with 3 when another
    start of its id took its place: let nothing start it again then, unless with --standby. After SIGTERM it
    takes no new legs and waits for those that run.
    """
    from kvrouter.config.fleet_checks import load_fleet  # noqa: PLC0415
    from kvrouter.config.one_worker import FLAGS, flag_of, fleet_of_one  # noqa: PLC0415

    said = described({name: flags.pop(name) for name in tuple(flags) if name in FLAGS})
    document, loaded = begun(flags, fleet)
    if is_static and (engine_events is not None or enable_local_indexer):
        raise click.UsageError("--static: such a worker publishes no KV events")
    if is_static and is_standby:
        raise click.UsageError("--static: such a worker is announced nowhere, and has no place to wait for")
    if document is None:
        if group is not None or index:
            raise click.UsageError("--group and --index are about the workers of --fleet")
        of_fleet = fleet_of_one(said)
        group = of_fleet.workers[0].name
    else:
        if said:
            given = ", ".join(flag_of(name) for name in said)
            raise click.UsageError(f"{given}: the fleet file says so already")
        of_fleet = load_fleet(document).fleet
    from kvrouter.commands.mock_worker import MockWorkerSpec, serve_mock_worker  # noqa: PLC0415

    spec = MockWorkerSpec.pick(
        of_fleet,
        group=group,
        index=index,
        worker_id=worker_id,
        enable_local_indexer=enable_local_indexer,
        engine_events=engine_events,
        numbered=document is not None,
        is_static=is_static,
        is_standby=is_standby,
    )
    sys.exit(serve_mock_worker(loaded.settings, spec, os.environ, drain_limit_s=drain_limit_s))


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


def described(flags: Mapping[str, object]) -> dict[str, object]:
    """The flags that were given: neither unset nor an empty list."""
    return {name: list(value) if isinstance(value, tuple) else value
            for name, value in flags.items() if value is not None and value != ()}  # fmt: skip


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
@click.option(
    "--selector", default="", metavar="LABELS", help="Only pods with these labels too, as team=a,tier!=test."
)
@click.option("--engine-namespace", metavar="NAME", help="Another namespace than this pod's own.")
@click.option(
    "--drain-limit-s", type=float, default=30.0, show_default=True, help="Time for running legs at the end."
)
def worker_pods(
    selector: str, engine_namespace: str | None, drain_limit_s: float, **flags: SettingValue | None
) -> None:
    """Make every pod with the label kvrouter.dev/engine part of a fleet; its image and command stay as they
    are. What the engine cannot be asked is said in the pod's annotations.

    Of several such processes one serves each engine, and another takes over when that one ends.
    """
    _, loaded = begun(flags)
    from kvrouter.attach.pod_fleet import EnginePods  # noqa: PLC0415
    from kvrouter.commands.engine_pods import serve_pod_workers  # noqa: PLC0415

    pods = EnginePods(selector=selector, namespace=engine_namespace)
    sys.exit(serve_pod_workers(loaded.settings, pods, os.environ, drain_limit_s=drain_limit_s))


worker_pods.params.extend(setting_options("planes", "log"))


@click.command(cls=SettingsCommand, short_help="Decide for engines that something else fronts.")
@click.option(
    "--component",
    type=click.Choice(["all", "prefill", "backend"]),
    default="all",
    show_default=True,
    help="prefill: the prefill leg alone, each prefill worker a target of its own. backend: workers that "
    "decode, or serve whole requests. all: whole requests, pairs where prefill workers are.",
)
@click.option(
    "--lease-ttl-s",
    type=click.FloatRange(min=0, min_open=True),
    default=300.0,
    show_default=True,
    metavar="SECONDS",
    help="A booking of which nobody says anything for this long ends. Every call about it renews it.",
)
@click.option(
    "--bookings-max",
    type=click.IntRange(min=1),
    default=65_536,
    show_default=True,
    metavar="INT",
    help="How many requests may be booked at a time; then 503.",
)
@click.option(
    "--prefills-max",
    type=click.IntRange(min=1),
    default=4096,
    show_default=True,
    metavar="INT",
    help="How many prefill legs may run at a time; then 503. With --component prefill.",
)
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="A fleet file whose router, frontend, planes and log sections, and links, are used.",
)
@click.option(
    "--model-path",
    "model_paths",
    multiple=True,
    metavar="MODEL=FOLDER",
    help="A model's tokenizer: this host's folder, a Hugging Face repository, or engine; without it what its "
    "workers name is read. "
    "Who sends token ids needs none.",
)
def router(
    component: str,
    lease_ttl_s: float,
    bookings_max: int,
    prefills_max: int,
    config: Path | None,
    model_paths: tuple[str, ...],
    **flags: SettingValue | None,
) -> None:
    """Serve decisions over HTTP, for engines that something else fronts.

    POST /v1/route says which worker a request should go to, and books it there until its owner frees it.
    With --component prefill, POST /v1/prefill also sends the prefill leg, and answers with where the KV
    waits and what decode must obey. Requests themselves go elsewhere.

    It finds workers as a frontend does: they share --namespace, --discovery and --request-plane.
    """
    document, loaded = begun(flags, config)
    sources = model_sources(model_paths)
    from kvrouter.commands.router import RouterComponent, StandaloneSpec, serve_standalone  # noqa: PLC0415
    from kvrouter.config.link_table import link_warnings  # noqa: PLC0415
    from kvrouter.wiring.fleet_build import links_of  # noqa: PLC0415

    spec = StandaloneSpec(
        component=RouterComponent(component),
        lease_ttl_s=lease_ttl_s,
        bookings_max=bookings_max,
        prefills_max=prefills_max,
    )
    links = None if document is None else links_of(document)
    warn(link_warnings(loaded.settings.router, links))
    sys.exit(serve_standalone(loaded.settings, spec, sources, links))


router.params.extend(setting_options("router", "frontend", "planes", "log"))

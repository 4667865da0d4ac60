"""``kvrouter worker vllm``, ``sglang`` and ``trtllm``: the worker beside an engine that runs already."""

import os
import sys
from pathlib import Path
from urllib.parse import urlsplit

import click

from kvrouter.cli.flags import SettingsCommand, given_flags, setting_options
from kvrouter.cli.place import place_options
from kvrouter.cli.processes import begin, described
from kvrouter.config.one_worker import FLAGS, fleet_of_one, worker_id_of
from kvrouter.config.sources import ENGINE_KEY_VARIABLE, load_settings
from kvrouter.core.errors import ConfigError

_VLLM_HELP = """Make a vLLM server part of a fleet; the server's own image and command stay as they are.

Its model, block size, capacity, ranks and event sources are asked of it. Start it with prefix caching and KV
events, as the page on vLLM shows. A key that it asks for is taken from KVROUTER_ENGINE_API_KEY.
"""

_SGLANG_HELP = """Make an SGLang server part of a fleet; the server's own image and command stay as they are.

Its model, page size, capacity, ranks and event sources are asked of it. Start it with KV events and
--enable-cache-report, as the page on SGLang shows. A key that it asks for is taken from
KVROUTER_ENGINE_API_KEY.
"""

_TRTLLM_HELP = """Make a TensorRT-LLM server part of a fleet; its own image and command stay as they are.

Its model is asked of it, and what else it tells: where it tells neither its block size nor its context, give
--block-size and --context-length. Its KV events are asked for over HTTP, or heard where --kv-events says. The
page on TensorRT-LLM shows how to start it. A key that it asks for is taken from KVROUTER_ENGINE_API_KEY.
"""


def _engine_command(kind: str, *, short_help: str, text: str) -> click.Command:
    options = [
        click.option("--url", required=True, metavar="URL", help="Its server, as http://127.0.0.1:8000."),
        click.option(
            "--model", metavar="NAME", help="Which of the names that it serves.  [default: the first]"
        ),
        click.option(
            "--tokenizer",
            type=click.Path(path_type=Path, exists=True, file_okay=False),
            metavar="FOLDER",
            help="The model's tokenizer folder, for frontends on this host.  [default: the engine's own]",
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
    command = click.command(kind, cls=SettingsCommand, short_help=short_help, help=text)(serve)
    command.params.extend(setting_options("planes", "log"))
    return command


def _serve(
    kind: str,
    *,
    url: str,
    model: str | None,
    tokenizer: Path | None,
    role: str | None,
    worker_id: int | None,
    block_size: int | None,
    context_length: int | None,
    kv_events: str | None,
    kv_events_replay: str | None,
    no_kv_events: bool,
    enable_local_indexer: bool,
    is_standby: bool,
    engine_wait_s: float,
    drain_limit_s: float,
    **flags: object,
) -> None:
    said = described({"role": role, **{name: flags.pop(name) for name in tuple(flags) if name in FLAGS}})
    setting_flags = {name: value for name, value in flags.items() if isinstance(value, str | bool)}
    loaded = load_settings(flags=given_flags(dict(setting_flags)), environ=os.environ, document=None)
    begin(loaded)
    if kv_events_replay is not None and kv_events is None:
        raise click.UsageError("--kv-events-replay: only together with --kv-events")
    if no_kv_events and kv_events is not None:
        raise click.UsageError("--no-kv-events and --kv-events contradict each other")
    of_fleet = fleet_of_one(said)
    group = of_fleet.workers[0]
    from kvrouter.assembly.attach_words import EngineAt, EngineKind  # noqa: PLC0415
    from kvrouter.assembly.described import placed_config  # noqa: PLC0415
    from kvrouter.assembly.engine_worker import EngineWorkerSpec, serve_engine_worker  # noqa: PLC0415

    spec = EngineWorkerSpec(
        at=EngineAt(
            kind=EngineKind(kind),
            url=_checked_url(url),
            role=group.role,
            model=model,
            block_size=block_size,
            context_length=context_length,
            kv_events=kv_events,
            kv_events_replay=kv_events_replay,
            publishes_kv_events=not no_kv_events,
            api_key=os.environ.get(ENGINE_KEY_VARIABLE) or None,
            wait_s=engine_wait_s,
        ),
        worker_id=worker_id_of(worker_id),
        tokenizer=tokenizer,
        runtime_config=placed_config(of_fleet, group),
        enable_local_indexer=enable_local_indexer,
        is_standby=is_standby,
    )
    sys.exit(serve_engine_worker(loaded.settings, spec, os.environ, drain_limit_s=drain_limit_s))


def _checked_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ConfigError(f"--url: must be http://HOST:PORT, or https, not {url!r}", param="url")
    return url


worker_vllm = _engine_command("vllm", short_help="Beside a vLLM server that runs already.", text=_VLLM_HELP)
worker_sglang = _engine_command(
    "sglang", short_help="Beside an SGLang server that runs already.", text=_SGLANG_HELP
)
worker_trtllm = _engine_command(
    "trtllm", short_help="Beside a TensorRT-LLM server that runs already.", text=_TRTLLM_HELP
)

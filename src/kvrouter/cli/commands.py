"""The commands of ``kvrouter``. Each imports what it needs when it runs, so that ``--help`` is quick."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from kvrouter.cli.calibrate import calibrate
from kvrouter.cli.engines import ENGINE_COMMANDS, topology
from kvrouter.cli.flags import SettingsCommand, given_flags, setting_options
from kvrouter.cli.operator import operator
from kvrouter.cli.processes import begin, frontend, model_folders, router, warn, worker, worker_pods
from kvrouter.cli.replay import replay
from kvrouter.cli.worth import worth
from kvrouter.config.fleet import FleetFile
from kvrouter.config.fleet_checks import (
    default_fleet_document,
    default_fleet_path,
    load_fleet,
    settings_in,
    settled,
)
from kvrouter.config.planes import refuse_clusters
from kvrouter.config.problems import Problem, read_document
from kvrouter.config.setting import SettingValue, installed_version
from kvrouter.config.sources import FLEET_VARIABLE, conflicts, load_settings, settings_warnings

if TYPE_CHECKING:
    from rich.console import Console

NO_DISCOVERY = "kvrouter up discovers no workers: give it to kvrouter frontend"

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


@click.group(context_settings=CONTEXT)
@click.version_option(
    installed_version(), "-V", "--version", prog_name="kvrouter", message="%(prog)s %(version)s"
)
def kvrouter() -> None:
    """Route LLM requests to the worker that answers soonest, and keep KV transfers in their domain."""


@kvrouter.command(cls=SettingsCommand, short_help="Serve a fleet.")
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
    help="A model's tokenizer: this host's folder, or a Hugging Face repository; with --engine-pods.",
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
    flags: dict[str, SettingValue | None],
) -> NoReturn:
    loaded = load_settings(flags=given_flags(flags), environ=os.environ, document=None)
    refuse_clusters(loaded.settings.planes, NO_DISCOVERY)
    begin(loaded)
    from kvrouter.attach.pod_fleet import EnginePods  # noqa: PLC0415
    from kvrouter.commands.engine_pods import serve_engine_pods  # noqa: PLC0415

    pods = EnginePods(selector=selector, namespace=namespace)
    sys.exit(serve_engine_pods(loaded.settings, pods, model_folders(model_paths), os.environ))


kvrouter.add_command(frontend)
kvrouter.add_command(worker)
for command in ENGINE_COMMANDS:
    worker.add_command(command)
worker.add_command(worker_pods)
kvrouter.add_command(router)


@kvrouter.command(short_help="Show where a prompt would go, or a request went, and why.")
@click.argument("prompt", required=False)
@click.option("--request-id", metavar="ID", help="Show where this request went, instead of a prompt.")
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="The running router.")
@click.option("--model", help="The model; may be left out where one is served.")
@click.option("--completion", is_flag=True, help="Take PROMPT as a completion's, without the chat template.")
@click.option("--json", "as_json", is_flag=True, help="Print the router's answer as it is.")
def explain(
    prompt: str | None,
    *,
    request_id: str | None,
    url: str,
    model: str | None,
    completion: bool,
    as_json: bool,
) -> None:
    """Show where PROMPT, sent as a chat, would go, and why: every worker, its cost, and why others may not
    take it. With --request-id: where one of the last requests went, attempt by attempt.

    A refusal is an answer too, with its error first, and exit code 0; 1 says that the router could not be
    asked.

    Where the router has an admin token, it is read from KVROUTER_ADMIN_TOKEN.
    """
    from kvrouter.cli.client import RouterClient  # noqa: PLC0415

    if (prompt is None) == (request_id is None):
        raise click.UsageError("give PROMPT, or --request-id ID, and not both")
    client = RouterClient(url, token=os.environ.get("KVROUTER_ADMIN_TOKEN"))
    if prompt is not None:
        answer = client.explain(prompt, model or client.only_model(), is_completion=completion)
        _show_explanation(answer, as_json=as_json)
    elif request_id is not None:
        if model is not None or completion:
            raise click.UsageError("--model and --completion are about PROMPT, not about --request-id")
        _show_decisions(client.decisions(request_id), as_json=as_json)


def _show_explanation(answer: bytes, *, as_json: bool) -> None:
    from kvrouter.cli.explain import draw, read_explanation  # noqa: PLC0415

    explanation = read_explanation(answer)
    if as_json:
        click.echo(answer.decode())
    else:
        draw(explanation, _console())


def _show_decisions(answer: bytes, *, as_json: bool) -> None:
    from kvrouter.cli.explain import draw_decisions, read_decisions  # noqa: PLC0415

    decisions = read_decisions(answer)
    if as_json:
        click.echo(answer.decode())
    else:
        draw_decisions(decisions, _console())


def _console() -> "Console":
    """The terminal; what is no terminal gets wide lines without colour."""
    from rich.console import Console  # noqa: PLC0415

    console = Console()
    return console if console.is_terminal else Console(width=140, no_color=True)


kvrouter.add_command(replay)
kvrouter.add_command(calibrate)
kvrouter.add_command(worth)
kvrouter.add_command(topology)
kvrouter.add_command(operator)


@kvrouter.group("fleet")
def fleet_group() -> None:
    """Fleet files."""


@fleet_group.command("check")
@click.argument("file", type=click.Path(path_type=Path))
def fleet_check(file: Path) -> None:
    """Validate FILE, its settings and topology contracts too, read the tokenizers that it names, and start
    nothing. All mistakes are shown at once, by line.
    """
    from kvrouter.wiring.fleet_build import contract_problems, tokenizer_problems  # noqa: PLC0415

    def setting_problems(fleet: FleetFile) -> list[Problem]:
        return conflicts(settings_in(fleet))

    loaded = load_fleet(read_document(file), (setting_problems, contract_problems, tokenizer_problems))
    fleet = loaded.fleet
    warn((*settings_warnings(settings_in(fleet)), *loaded.warnings))
    n_workers = sum(group.n_workers for group in fleet.workers)
    workers = f"{n_workers} worker{'' if n_workers == 1 else 's'}"
    policy = fleet.kv_transfer
    kept = f"KV {policy.enforcement.value} on {policy.domain}" if policy else "no transfer policy"
    names = ", ".join(model.name for model in fleet.models)
    click.echo(f"{file}: good: {workers} for {names}, {kept}")


def _fleet_file(fleet: Path | None) -> Path | None:
    named = fleet or os.environ.get(FLEET_VARIABLE, "").strip()
    return Path(named) if named else None

"""Replay the trace sample through HTTP, once per router mode, each time before a fresh fleet.

    python -m benchmarks.replay_sample

Prints a table and writes the figures to benchmarks/results. Ends with 1 when a request failed, when a KV
transfer left a required domain, or when routing by KV cache did not beat round-robin.
"""

import asyncio
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from benchmarks.http_replay.ceiling import prompt_ceiling
from benchmarks.http_replay.client import Answer, Target, replay
from benchmarks.http_replay.fleet import (
    FleetFailed,
    FleetProcess,
    fetch,
    transfer_policy,
    up_command,
    write_fleet_file,
)
from benchmarks.http_replay.machine import ROOT, this_commit, this_machine
from benchmarks.http_replay.observe import fleet_workers, handoffs
from benchmarks.http_replay.result import ModeResult, Observed, Report, problems, remarks, sum_up
from benchmarks.http_replay.schedule import PlannedRequest, first_rows, plan
from benchmarks.http_replay.table import markdown, rich_table
from benchmarks.http_replay.trace import read_sample
from kvrouter.core.constraints import RouterMode
from kvrouter.core.errors import ConfigError
from kvrouter.core.workers import Enforcement
from kvrouter.fleetfile.fleet_checks import load_fleet
from kvrouter.fleetfile.fleet_file import FleetFile
from kvrouter.settings.problems import read_document
from kvrouter.text.chat import ChatTemplate
from kvrouter.text.model import mock_words
from kvrouter.text.source import MOCK_FOLDER
from kvrouter.text.tokenizer import Tokenizer
from tests.testing.processes import free_ports

SAMPLE = ROOT / "data" / "mooncake-conversation-sample.jsonl"
FLEET = ROOT / "benchmarks" / "http_replay" / "fleet.yaml"
RESULTS = ROOT / "benchmarks" / "results"
SPEEDUP = 2.0
COMPRESSION = 100.0
MODES = ",".join(RouterMode)

Conversations = Sequence[Sequence[PlannedRequest]]


def parse_modes(_context: click.Context, _parameter: click.Parameter, text: str) -> tuple[RouterMode, ...]:
    """The modes in a comma-separated list, each once."""
    try:
        modes = [RouterMode(name.strip()) for name in text.split(",")]
    except ValueError as error:
        raise click.BadParameter(f"{error}; choose from {MODES}") from None
    return tuple(dict.fromkeys(modes))


def ceiling_of(conversations: Conversations, *, block_size: int) -> float:
    """The most that any router could have found cached, with the prompts as the fleet tokenizes them."""
    tokenizer = Tokenizer.from_folder(MOCK_FOLDER)
    template = ChatTemplate.from_folder(MOCK_FOLDER)
    if template is None:
        raise ConfigError(f"{MOCK_FOLDER} has no chat template")
    requests = sorted((request for turns in conversations for request in turns), key=lambda each: each.due_s)
    rendered = (template.render([{"role": "user", "content": each.prompt}]) for each in requests)
    return prompt_ceiling(map(tokenizer.encode, rendered), block_size=block_size)


def run_mode(
    mode: RouterMode,
    conversations: Conversations,
    *,
    fleet_file: Path,
    fleet: FleetFile,
    on_answer: Callable[[Answer], None],
) -> ModeResult:
    """Start a fleet, replay all conversations, stop it. Raises ``FleetFailed``."""
    port = free_ports(1)
    with FleetProcess(
        up_command(fleet_file, router_mode=mode, port=port),
        base_url=f"http://127.0.0.1:{port}",
        log_file=fleet_file.with_name(f"{mode}.log"),
    ) as process:
        before = handoffs(fetch(f"{process.base_url}/metrics").decode())
        target = Target(base_url=process.base_url, model=fleet.models[0].mock_name, speedup=fleet.speedup)
        start_s = time.perf_counter()
        answers = asyncio.run(replay(target, conversations, on_answer=on_answer))
        duration_s = time.perf_counter() - start_s
        observed = Observed(
            duration_s=duration_s,
            handoffs=handoffs(fetch(f"{process.base_url}/metrics").decode()) - before,
            workers=fleet_workers(fetch(f"{process.base_url}/v1/fleet")),
            domain=transfer_policy(fleet).domain,
        )
    return sum_up(mode, answers, observed)


def counting(progress: Progress, task: TaskID) -> Callable[[Answer], None]:
    """What moves a progress bar on with each answer."""
    errors = 0

    def count(answer: Answer) -> None:
        nonlocal errors
        errors += answer.error is not None
        progress.update(task, advance=1, errors=errors)

    return count


def run_modes(
    modes: Sequence[RouterMode],
    conversations: Conversations,
    *,
    fleet: FleetFile,
    console: Console,
) -> tuple[ModeResult, ...]:
    """Replay once per mode, with a progress bar each."""
    requests = sum(map(len, conversations))
    results: list[ModeResult] = []
    columns = (
        TextColumn("{task.description:>12}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[errors]} errors"),
        TimeElapsedColumn(),
    )
    with (
        tempfile.TemporaryDirectory(prefix="kvrouter-replay-") as folder,
        Progress(*columns, console=console) as progress,
    ):
        fleet_file = Path(folder) / "fleet.yaml"
        write_fleet_file(fleet, fleet_file)
        for mode in modes:
            task = progress.add_task(str(mode), total=requests, errors=0)
            results.append(
                run_mode(
                    mode,
                    conversations,
                    fleet_file=fleet_file,
                    fleet=fleet,
                    on_answer=counting(progress, task),
                )
            )
    return tuple(results)


@click.command(help=__doc__)
@click.option(
    "--modes", callback=parse_modes, default=MODES, show_default=True, help="Router modes to compare."
)
@click.option(
    "--speedup",
    type=click.FloatRange(min=0, min_open=True),
    default=SPEEDUP,
    show_default=True,
    help="How much faster than their own time the engines and the arrivals run.",
)
@click.option(
    "--compression",
    type=click.FloatRange(min=0, min_open=True),
    default=COMPRESSION,
    show_default=True,
    help="Seconds of the trace in one second of the engines' time: how dense the arrivals are.",
)
@click.option(
    "--fleet",
    "fleet_path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    default=FLEET,
    help="Fleet file.",
)
@click.option("--rows", type=click.IntRange(min=4), default=300, show_default=True, help="Rows, at most.")
@click.option(
    "--json", "output", type=click.Path(dir_okay=False, path_type=Path), help="Where the figures go."
)
@click.option("--markdown", "as_markdown", is_flag=True, help="Print the table as Markdown.")
def main(
    *,
    modes: tuple[RouterMode, ...],
    speedup: float,
    compression: float,
    fleet_path: Path,
    rows: int,
    output: Path | None,
    as_markdown: bool,
) -> None:
    """Replay, print, write, judge."""
    console, notes = Console(), Console(stderr=True)
    chosen = first_rows(read_sample(SAMPLE), rows)
    conversations = plan(chosen, compression=compression, words=mock_words())
    commit = this_commit()
    try:
        fleet = load_fleet(read_document(fleet_path)).fleet.model_copy(update={"speedup": speedup})
        policy = transfer_policy(fleet)
        results = run_modes(modes, conversations, fleet=fleet, console=notes)
    except (ConfigError, FleetFailed, OSError) as error:
        raise click.ClickException(str(error)) from error
    report = Report(
        commit=commit,
        machine=this_machine(),
        rows=len(chosen),
        conversations=len(conversations),
        speedup=speedup,
        compression=compression,
        ceiling=ceiling_of(conversations, block_size=fleet.models[0].mock_block_size),
        domain=policy.domain,
        required=policy.enforcement is Enforcement.REQUIRED,
        modes=results,
    )
    output = output or RESULTS / f"replay-sample-{commit.id}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    if as_markdown:
        click.echo(markdown(report))
    else:
        console.print(rich_table(report))
    notes.print(f"figures: {output}")
    for remark in remarks(report):
        notes.print(remark, style="yellow")
    found = problems(report)
    for problem in found:
        notes.print(f"not as it must be: {problem}", style="red")
    if found:
        raise SystemExit(1)


if __name__ == "__main__":
    main()

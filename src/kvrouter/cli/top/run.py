"""``kvrouter top``: the fleet of a running router, live in a terminal."""

import os
import select
import sys
import termios
import threading
import time
import tty
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvrouter.api.client import AskFailed, RouterClient, decode_answer
from kvrouter.api.decision_schema import LastDecision, LastDecisions, RankId
from kvrouter.api.fleet_schema import ExpectedEngine, ExpectedState, Fleet, Flow, Flows, Worker
from kvrouter.cli.progress import ended_by_signals, working

DECISIONS_SHOWN = 8
WORKERS_SHOWN = 200
"""More are counted; the page at /ui shows them all."""

READ_BYTES = 64
KEY_INTERVAL_S = 0.05
"""How often the keys are looked at while the router is asked."""

SIGNAL_WAIT_S = 0.5
"""The longest that a signal which came at a bad moment waits."""

NUMBERS = frozenset(
    ("load", "running", "waiting", "cached blocks", "of candidates", "handoffs", "bytes", "now")
)
"""The columns of numbers."""

GOOD, BAD, QUIET = "green", "bold red", "dim"
QUIT_HINT = Text("q ends it", QUIET)


class Frame(msgspec.Struct, frozen=True):
    """All that is shown at a time."""

    fleet: Fleet
    decisions: Sequence[LastDecision]
    flows: Sequence[Flow]


class Answers(msgspec.Struct, frozen=True):
    """A router's own answers, as they are: ``/v1/fleet``, ``/v1/decisions`` and ``/v1/flows``."""

    fleet: msgspec.Raw
    decisions: msgspec.Raw
    flows: msgspec.Raw


def read_answers(client: RouterClient) -> Answers:
    """Ask a router for the shown values. Raises AskFailed."""
    return Answers(
        msgspec.Raw(client.fleet()),
        msgspec.Raw(client.latest_decisions(DECISIONS_SHOWN)),
        msgspec.Raw(client.flows()),
    )


def shown_frame(answers: Answers) -> Frame:
    """Return the frame for a router's answers. Raises AskFailed for the answers of another program."""
    return Frame(
        decode_answer(bytes(answers.fleet), Fleet),
        decode_answer(bytes(answers.decisions), LastDecisions).decisions,
        decode_answer(bytes(answers.flows), Flows).flows,
    )


def read_frame(client: RouterClient) -> Frame:
    """Ask a router for the next frame. Raises AskFailed."""
    return shown_frame(read_answers(client))


class Keys:
    """The keys of standard input; none where that is no terminal."""

    def __init__(self, *, is_terminal: bool) -> None:
        self.is_terminal = is_terminal

    def is_pressed(self, key: str, *, within_s: float) -> bool:
        """Wait for a key until the time is over; the end of the input counts as any key.

        It waits in pieces: a signal that arrives just before a wait begins is handled only when that ends.
        """
        awaited = [sys.stdin] if self.is_terminal else []
        until_s = time.monotonic() + within_s
        while (left_s := until_s - time.monotonic()) > 0:
            if select.select(awaited, [], [], min(left_s, SIGNAL_WAIT_S))[0]:
                pressed = os.read(sys.stdin.fileno(), READ_BYTES)
                if not pressed or key.encode() in pressed.lower():
                    return True
        return False


@contextmanager
def terminal_keys() -> Iterator[Keys]:
    """Have the terminal hand over each key at once, without showing it; it is as before at the end."""
    if not sys.stdin.isatty():
        yield Keys(is_terminal=False)
        return
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield Keys(is_terminal=True)
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSAFLUSH, before)


def show_live(client: RouterClient, url: str, console: Console, *, interval_s: float) -> None:
    """Show a router in the whole terminal until ``q`` or Ctrl-C. Raises AskFailed where it does not answer at
    first; one that is lost later does not end it.
    """
    with working(f"asking {url}"):
        first = drawn(read_frame(client), url)
    asked = frames(client, url, first)
    with (
        suppress(KeyboardInterrupt),
        ended_by_signals(),
        terminal_keys() as keys,
        Live(first, console=console, screen=True, auto_refresh=False) as live,
    ):
        while True:
            frame = _next_frame(asked)
            while not frame.done():
                if keys.is_pressed("q", within_s=KEY_INTERVAL_S):
                    return
            shown = frame.result()
            live.update(Group(QUIT_HINT, shown) if keys.is_terminal else shown, refresh=True)
            if keys.is_pressed("q", within_s=interval_s):
                return


def _next_frame(asked: Iterator[RenderableType]) -> Future[RenderableType]:
    """Ask for the next frame in a thread that ends with the process: a router may take long to answer."""
    frame: Future[RenderableType] = Future()

    def ask() -> None:
        try:
            frame.set_result(next(asked))
        except BaseException as error:  # noqa: BLE001 - it is raised where the frame is taken
            frame.set_exception(error)

    threading.Thread(target=ask, name="frame", daemon=True).start()
    return frame


def frames(client: RouterClient, url: str, shown: RenderableType) -> Iterator[RenderableType]:
    """Yield the next frame for ever; for a router that does not answer its last one, and since when."""
    lost_at: str | None = None
    while True:
        try:
            shown, lost_at = drawn(read_frame(client), url), None
            yield shown
        except AskFailed as error:
            lost_at = lost_at or time.strftime("%H:%M:%S")
            yield Group(Text(f"not reachable since {lost_at}: {error.message}", BAD), shown)


def drawn(frame: Frame, url: str) -> RenderableType:
    """Return the whole picture."""
    fleet = frame.fleet
    able = sum(_state(worker) == ("ok", GOOD) for worker in fleet.workers)
    waiting = sum(model.waiting_requests for model in fleet.models)
    problems = [engine for engine in fleet.expected_engines or () if engine.has_problem]
    missing = sum(engine.state != ExpectedState.JOINED for engine in problems)
    head = Text.assemble(
        ("kvrouter ", "bold"),
        f"{url}  {able} of {len(fleet.workers)} workers take requests, {fleet.running_requests} run, ",
        (f"{waiting} wait", BAD if waiting else ""),
        (f", {missing} of {len(fleet.expected_engines or ())} engines not joined" if missing else "", BAD),
        ("  draining" if fleet.draining else "", BAD),
    )
    parts: list[RenderableType] = [head, _workers(fleet.workers)]
    if problems:
        parts.append(_engines(problems, fleet.time_s))
    if frame.flows:
        parts.append(_flows(frame.flows))
    parts.append(_decisions(frame.decisions))
    return Group(*parts)


def _workers(workers: Sequence[Worker]) -> Table:
    table = _table(
        "worker", "role", "place", "state", "load", "running", "waiting", "cached blocks", "feed", "engine"
    )
    if len({worker.model for worker in workers}) > 1:
        table.add_column("model")
    for worker in sorted(workers, key=lambda worker: (_place(worker), worker.role, worker.worker_id))[
        :WORKERS_SHOWN
    ]:
        state, style = _state(worker)
        row: list[str | Text] = [
            str(worker.worker_id),
            worker.role,
            _place(worker) or "–",
            Text(state, style),
            _load(worker),
            _sum(rank.report.running_requests if rank.report else None for rank in worker.ranks),
            _sum(rank.report.waiting_requests if rank.report else None for rank in worker.ranks),
            _sum(rank.index_blocks for rank in worker.ranks),
            _feeds(worker),
            worker.engine or "–",
        ]
        if len(table.columns) > len(row):
            row.append(worker.model)
        table.add_row(*(each if isinstance(each, Text) else Text(each) for each in row))
    if len(workers) > WORKERS_SHOWN:
        table.caption = f"and {len(workers) - WORKERS_SHOWN} more"
    return table


def _engines(problems: Sequence[ExpectedEngine], now_s: float | None) -> Table:
    """Return the engines without a worker, and those with a wrong URL."""
    table = _table("engine", "role", "named at", "state", "for")
    table.add_column("why", overflow="fold")
    for engine in problems[:WORKERS_SHOWN]:
        known = None not in (now_s, engine.since_s)
        for_s = (now_s or 0.0) - (engine.since_s or 0.0)
        table.add_row(
            Text(engine.engine_url or engine.pod or "–"),
            Text(engine.role or "–"),
            Text(engine.written_at or "–"),
            Text(engine.state, BAD),
            f"{max(for_s, 0.0):,.0f} s" if known else "–",
            Text(engine.reason or "–"),
        )
    if len(problems) > WORKERS_SHOWN:
        table.caption = f"and {len(problems) - WORKERS_SHOWN} more"
    return table


def _state(worker: Worker) -> tuple[str, str]:
    for holds, state in (
        (not worker.alive, "silent"),
        (worker.engine_silent, "engine silent"),
        (worker.draining, "draining"),
        (worker.several_engines, "several engines"),
        (worker.cordons, "cordoned: " + ", ".join(each.place for each in worker.cordons)),
        (worker.circuit != "closed", f"circuit {worker.circuit}"),
    ):
        if holds:
            return state, BAD
    return "ok", GOOD


def _place(worker: Worker) -> str:
    names = [*worker.levels, *sorted(worker.domains.keys() - {*worker.levels})]
    return " ".join(f"{name}={worker.domains[name]}" for name in names if name in worker.domains)


def _load(worker: Worker) -> str:
    """Return a prefill worker's tokens that wait for prefill, another worker's blocks in use."""
    if worker.role == "prefill":
        return f"{sum(rank.prefill_tokens for rank in worker.ranks):,} tok"
    active = sum(rank.active_blocks for rank in worker.ranks)
    totals = [rank.total_blocks for rank in worker.ranks]
    known = [total for total in totals if total]
    return f"{active / sum(known):.0%}" if known and len(known) == len(totals) else f"{active:,} blk"


def _sum(values: Iterator[int | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{sum(known):,}" if known else "–"


def _feeds(worker: Worker) -> Text:
    states = sorted({rank.feed.state for rank in worker.ranks if rank.feed is not None})
    return Text(", ".join(states) or "–", BAD if set(states) - {"live"} else QUIET)


def _flows(flows: Sequence[Flow]) -> Table:
    table = _table("KV from → to", "handoffs", "bytes", "now", "cost")
    for flow in sorted(flows, key=lambda flow: -flow.bytes):
        ends = f"{flow.domain or ''} {flow.prefill_value or '–'} → {flow.decode_value or '–'}".strip()
        crosses = flow.prefill_value != flow.decode_value
        table.add_row(
            Text(ends, "yellow" if crosses else ""),
            f"{flow.handoffs:,}",
            _bytes(flow.bytes),
            f"{_bytes(flow.bytes_per_s)}/s",
            "–" if flow.cost is None else f"{flow.cost:.6g}",
        )
    return table


def _decisions(decisions: Sequence[LastDecision]) -> Table:
    table = _table("decided", "request", "attempt", "prefill", "decode", "cached blocks", "of candidates", "")
    for decided in decisions:
        picks = [pick for pick in (decided.prefill, decided.decode) if pick is not None]
        note = "left its domain" if decided.fallback_used or decided.cross_domain else ""
        table.add_row(
            time.strftime("%H:%M:%S", time.localtime(decided.decided_at)),
            decided.request_id[:24],
            str(decided.attempt + 1),
            _rank(decided.prefill),
            _rank(decided.decode),
            str(picks[0].overlap_blocks) if picks else "–",
            str(picks[0].candidates) if picks else "–",
            Text(note, "yellow"),
        )
    return table


def _rank(pick: RankId | None) -> str:
    return "–" if pick is None else f"{pick.worker_id}/{pick.dp_rank}"


def _bytes(number: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} TB"


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", show_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in NUMBERS else "left", no_wrap=True)
    return table

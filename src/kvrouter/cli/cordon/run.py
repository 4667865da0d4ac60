"""A router's answers about cordons, and how ``cordon``, ``uncordon`` and ``drain`` show them."""

import getpass
import socket
import time
from collections.abc import Callable, Sequence

from rich.table import Table
from rich.text import Text

from kvrouter.api.client import AskFailed, RouterClient, decode_answer
from kvrouter.api.cordon_schema import CordonBody, CordonChange, CordonedWorker, CordonList, CordonState
from kvrouter.cli.ask import plain_console
from kvrouter.cli.cordon.flags import CordonOptions
from kvrouter.cli.output import Output, echo
from kvrouter.cli.progress import LOG_INTERVAL_S

READ_AGAIN_S = 1.0
"""How often ``drain`` asks what still runs."""

EMPTY_READINGS = 2
"""How many readings in a row must have no running requests before a place counts as empty."""

WORKERS_NAMED = 8
"""For how many workers ``drain`` shows the running requests; for the others it shows the sum."""


def wait_empty(
    client: RouterClient,
    cordoned: CordonChange,
    *,
    timeout_s: float | None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Return once no request runs at the cordoned place, and every router has had the time to learn of it.
    Raises AskFailed when ``timeout_s`` seconds are over before, or the cordon is removed.

    A router that does not answer for a while is asked again.
    """
    began_s, n_empty, shown = clock(), 0, ""
    shown_s = began_s
    settled_s = began_s + 2 * cordoned.routers_look_every_s
    while True:
        try:
            running = _running_at(client, cordoned)
        except AskFailed as error:
            n_empty, progress = 0, f"what runs there is not known: {error.message}"
        else:
            if running is None:
                raise AskFailed(f"{cordoned.place}: somebody uncordoned it")
            n_empty = 0 if running else n_empty + 1
            progress = _progress(running)
        if n_empty >= EMPTY_READINGS and clock() >= settled_s:
            return
        if progress != shown:
            echo(f"{cordoned.place}: {progress}", err=True)
            shown, shown_s = progress, clock()
        elif clock() >= shown_s + LOG_INTERVAL_S:
            echo(f"{cordoned.place}: still, after {clock() - began_s:.0f} s: {progress}", err=True)
            shown_s = clock()
        left_s = None if timeout_s is None else began_s + timeout_s - clock()
        if left_s is not None and left_s <= 0.0:
            raise AskFailed(f"{cordoned.place}: after {timeout_s:g} s {progress}; the cordon stays")
        sleep(READ_AGAIN_S if left_s is None else min(READ_AGAIN_S, left_s))


def _running_at(client: RouterClient, cordoned: CordonChange) -> list[CordonedWorker] | None:
    """Return the workers of the cordon with running requests; None if the cordon is gone."""
    listed = decode_answer(client.cordons(), CordonList).cordons
    for each in listed:
        if (each.level, each.name) == (cordoned.level, cordoned.name):
            return [worker for worker in each.workers if worker.running_requests]
    return None


def _progress(running: Sequence[CordonedWorker]) -> str:
    total = sum(worker.running_requests for worker in running)
    if not total:
        return "nothing runs there; waiting until every router knows of the cordon"
    most = sorted(running, key=lambda worker: (-worker.running_requests, worker.worker_id))
    named = [f"worker {worker.worker_id}: {worker.running_requests}" for worker in most[:WORKERS_NAMED]]
    others = sum(worker.running_requests for worker in most[WORKERS_NAMED:])
    if others:
        named.append(f"{len(most) - WORKERS_NAMED} more workers: {others}")
    requests = "1 request runs" if total == 1 else f"{total} requests run"
    return f"{requests} ({', '.join(named)})"


def put_cordon(client: RouterClient, level: str, name: str, options: CordonOptions) -> bytes:
    """Cordon a place, and return the answer. Raises AskFailed."""
    who = f"{_user()}@{socket.gethostname()}" if options.by is None else options.by
    try:
        body = CordonBody(level, name, reason=options.reason, by=who, force=options.force)
        return client.cordon(body)
    except AskFailed as error:
        if error.router_code != "nobody_left":
            raise
        raise AskFailed(error.message.replace("force: must be true:", "needs --force:", 1)) from error


def _user() -> str:
    """Return the user of this process; its number without a name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "unknown"


def show_change(answer: bytes, changed: str, unchanged: str, output: Output) -> None:
    """Print the change, and what is left."""
    change = decode_answer(answer, CordonChange)
    output.show(lambda: answer, lambda: _say_change(change, changed, unchanged))
    for warning in change.warnings:
        echo(f"kvrouter: warning: {warning}", err=True)


def _say_change(change: CordonChange, changed: str, unchanged: str) -> None:
    n_workers = len(change.workers)
    workers = f"{n_workers} worker{'' if n_workers == 1 else 's'}"
    echo(f"{change.place} {changed if change.changed else unchanged} ({workers})")
    for each in change.remaining:
        echo(f"model {each.model}: {each.left} of {each.workers} {each.role} workers take new requests")


def show_cordons(answer: bytes, output: Output) -> None:
    """Print the cordons."""
    cordons = decode_answer(answer, CordonList).cordons
    output.show(lambda: answer, lambda: _draw_cordons(cordons))


def _draw_cordons(cordons: Sequence[CordonState]) -> None:
    if not cordons:
        echo("nothing is cordoned")
        return
    table = Table(box=None, pad_edge=False, header_style="bold", show_edge=False)
    for column in ("cordoned", "workers", "running", "since", "by", "reason"):
        table.add_column(column, justify="right" if column in ("workers", "running") else "left")
    for each in cordons:
        by = each.by or ("annotation of the node" if each.source == "node_annotation" else "–")
        where = f" in cluster {each.cluster}" if each.cluster else ""
        running = sum(worker.running_requests for worker in each.workers)
        row = (
            f"{each.place}{where}",
            str(len(each.workers)),
            str(running),
            each.at or "–",
            by,
            each.reason or "–",
        )
        table.add_row(*map(Text, row))
    plain_console().print(table)

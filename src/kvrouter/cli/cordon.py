"""``kvrouter cordon``, ``uncordon`` and ``drain``: no new requests to a worker, a node or a zone."""

import getpass
import socket
import time
from collections.abc import Callable, Sequence

import click
import msgspec
from rich.table import Table
from rich.text import Text

from kvrouter.cli.ask import plain_console, router_at, url_option
from kvrouter.cli.client import AskFailed, RouterClient, decode_answer

READ_AGAIN_S = 1.0
"""How often ``drain`` asks what still runs."""

EMPTY_READINGS = 2
"""How often in a row nothing must run before a place counts as empty."""

WORKERS_NAMED = 8
"""Of so many workers ``drain`` says what runs there; of the others the sum."""

CORDONS = "/v1/cordons"


class CordonedWorker(msgspec.Struct, frozen=True):
    """A worker that a cordon holds for."""

    worker_id: int
    model: str
    role: str
    alive: bool
    running_requests: int


class Listed(msgspec.Struct, frozen=True):
    """A cordon."""

    level: str
    name: str
    reason: str | None
    by: str | None
    at: str | None
    source: str
    cluster: str | None
    workers: Sequence[CordonedWorker]

    @property
    def place(self) -> str:
        """What is cordoned."""
        return f"{self.level} {self.name}"


class Remaining(msgspec.Struct, frozen=True):
    """How many of a model's workers of one role take new requests."""

    model: str
    role: str
    workers: int
    left: int


class ListAnswer(msgspec.Struct, frozen=True):
    """``GET /v1/cordons``."""

    cordons: Sequence[Listed]


class Change(Listed, frozen=True, kw_only=True):
    """``POST /v1/cordons``, and ``DELETE``."""

    changed: bool
    warnings: Sequence[str]
    remaining: Sequence[Remaining]
    routers_look_every_s: float


_reason = click.option("--reason", default="", metavar="TEXT", help="Why: it is shown with the cordon.")
_by = click.option("--by", metavar="WHO", help="Who asks for it.  [default: this user at this host]")
_force = click.option("--force", is_flag=True, help="Even if a model has no worker of one of its roles left.")
_json = click.option("--json", "as_json", is_flag=True, help="Print the router's answer as it is.")


@click.command(short_help="Keep new requests away from a worker, a node or a zone.")
@click.argument("level", required=False)
@click.argument("name", required=False)
@_reason
@_by
@_force
@url_option
@_json
def cordon(
    level: str | None,
    name: str | None,
    *,
    reason: str,
    by: str | None,
    force: bool,
    url: str,
    as_json: bool,
) -> None:
    """Keep new requests away from the workers of LEVEL NAME, at every router of the fleet. What runs there
    goes on. Workers that join there later are cordoned too, until `kvrouter uncordon LEVEL NAME`. Without
    arguments: list what is cordoned.

    LEVEL is worker (NAME is its id), node (a node of Kubernetes, else a host), or a level of the fleet's
    topology, such as zone.

    Where the router has an admin token, it is read from KVROUTER_ADMIN_TOKEN.
    """
    client = router_at(url)
    if level is None:
        if reason or by or force:
            raise click.UsageError("--reason, --by and --force are about LEVEL NAME")
        _print_list(client.read(CORDONS), as_json=as_json)
        return
    if name is None:
        raise click.UsageError("give LEVEL and NAME: worker 7, node gpu-4, zone a")
    answer = _put(client, level, name, reason=reason, by=by, force=force)
    _print_change(answer, "is cordoned", "was cordoned already", as_json=as_json)


@click.command(short_help="Take a cordon back.")
@click.argument("level")
@click.argument("name")
@url_option
@_json
def uncordon(level: str, name: str, *, url: str, as_json: bool) -> None:
    """Let new requests go to the workers of LEVEL NAME again, unless another cordon keeps them away.

    LEVEL is worker (NAME is its id), node (a node of Kubernetes, else a host), or a level of the fleet's
    topology, such as zone.

    Where the router has an admin token, it is read from KVROUTER_ADMIN_TOKEN.
    """
    answer = router_at(url).uncordon(level, name)
    _print_change(answer, "is uncordoned", "was not cordoned", as_json=as_json)


@click.command(short_help="Cordon, and wait until nothing runs there any more.")
@click.argument("level")
@click.argument("name")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0.0),
    metavar="SECONDS",
    help="How long to wait.  [default: for ever]",
)
@_reason
@_by
@_force
@url_option
def drain(
    level: str,
    name: str,
    *,
    timeout_s: float | None,
    reason: str,
    by: str | None,
    force: bool,
    url: str,
) -> None:
    """Cordon LEVEL NAME as `kvrouter cordon` does, and wait until no request runs on its workers. No request
    is cut; how many run where is said whenever it changes.

    Exit code 0: nothing runs there any more. 1: the time ran out, or the router could not be asked. In both
    cases the cordon stays, until `kvrouter uncordon LEVEL NAME`.

    LEVEL is worker (NAME is its id), node (a node of Kubernetes, else a host), or a level of the fleet's
    topology, such as zone.

    Where the router has an admin token, it is read from KVROUTER_ADMIN_TOKEN.
    """
    client = router_at(url)
    answer = _put(client, level, name, reason=reason, by=by, force=force)
    _print_change(answer, "is cordoned", "was cordoned already", as_json=False)
    change = decode_answer(answer, Change)
    wait_empty(client, change, timeout_s=timeout_s)
    click.echo(f"{change.place}: nothing runs there any more")


def wait_empty(
    client: RouterClient,
    cordoned: Change,
    *,
    timeout_s: float | None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Return once nothing runs at what is cordoned, and every router has had the time to learn of it. Raises
    AskFailed when ``timeout_s`` seconds are over before, or somebody takes the cordon back.

    A router that cannot be asked for a while is asked again.
    """
    began_s, n_empty, shown = clock(), 0, ""
    settled_s = began_s + 2 * cordoned.routers_look_every_s
    while True:
        try:
            running = _running_at(client, cordoned)
        except AskFailed as error:
            n_empty, said = 0, f"what runs there is not known: {error.message}"
        else:
            if running is None:
                raise AskFailed(f"{cordoned.place}: somebody uncordoned it")
            n_empty = 0 if running else n_empty + 1
            said = _progress(running)
        if n_empty >= EMPTY_READINGS and clock() >= settled_s:
            return
        if said != shown:
            click.echo(f"{cordoned.place}: {said}", err=True)
            shown = said
        left_s = None if timeout_s is None else began_s + timeout_s - clock()
        if left_s is not None and left_s <= 0.0:
            raise AskFailed(f"{cordoned.place}: after {timeout_s:g} s {said}; the cordon stays")
        sleep(READ_AGAIN_S if left_s is None else min(READ_AGAIN_S, left_s))


def _running_at(client: RouterClient, cordoned: Change) -> list[CordonedWorker] | None:
    """The workers of the cordon on which something runs; None where it is no cordon any more."""
    listed = decode_answer(client.read(CORDONS), ListAnswer).cordons
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


def _put(client: RouterClient, level: str, name: str, *, reason: str, by: str | None, force: bool) -> bytes:
    who = f"{_user()}@{socket.gethostname()}" if by is None else by
    try:
        return client.cordon({"level": level, "name": name, "reason": reason, "by": who, "force": force})
    except AskFailed as error:
        if error.said != "nobody_left":
            raise
        raise AskFailed(error.message.replace("force: must be true:", "needs --force:", 1)) from error


def _user() -> str:
    """Who this process belongs to; its number where it has no name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "unknown"


def _print_change(answer: bytes, changed: str, unchanged: str, *, as_json: bool) -> None:
    if as_json:
        click.echo(answer.decode())
        return
    change = decode_answer(answer, Change)
    n_workers = len(change.workers)
    workers = f"{n_workers} worker{'' if n_workers == 1 else 's'}"
    click.echo(f"{change.place} {changed if change.changed else unchanged} ({workers})")
    for each in change.remaining:
        click.echo(f"model {each.model}: {each.left} of {each.workers} {each.role} workers take new requests")
    for warning in change.warnings:
        click.echo(f"kvrouter: warning: {warning}", err=True)


def _print_list(answer: bytes, *, as_json: bool) -> None:
    if as_json:
        click.echo(answer.decode())
        return
    cordons = decode_answer(answer, ListAnswer).cordons
    if not cordons:
        click.echo("nothing is cordoned")
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

"""Process lifetime: signals, exit codes, limits of open files, and the listening sockets, bound first."""

import asyncio
import errno
import gc
import logging
import resource
import signal
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass

from kvrouter.core.allocator import map_large_blocks, use_huge_pages
from kvrouter.core.errors import KvrouterError
from kvrouter.telemetry import Event, log_event

logger = logging.getLogger("kvrouter.process")

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)

CONNECTIONS_MAX = 16_384
"""The default maximum of connections, where there are enough file descriptors."""

FILES_KEPT_MIN = 64
FILES_KEPT_MAX = 4096
FILES_UNLIMITED = 2**31
REFUSED_MAX = 64

LOST_PLACE = 3
"""The exit code of a worker that a newer start of its id replaced; an immediate restart would take the id
back, and so on for ever.
"""


class StopRequested(Exception):
    """The process was asked to stop during its start."""


@contextmanager
def stop_on_signals() -> Iterator[asyncio.Event]:
    """Yield an event that is set by the first stop signal; the next signal ends the process at once."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop() -> None:
        stopping.set()
        forget()

    def forget() -> None:
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)

    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, stop)
    try:
        yield stopping
    finally:
        forget()


@asynccontextmanager
async def unless_stopping(stopping: asyncio.Event) -> AsyncIterator[None]:
    """Cancel the body when ``stopping`` is set, and raise StopRequested."""
    task = asyncio.current_task()
    is_stopping = False

    async def give_up() -> None:
        nonlocal is_stopping
        await stopping.wait()
        is_stopping = True
        if task is not None:
            task.cancel()

    giving_up = asyncio.get_running_loop().create_task(give_up())
    try:
        yield
    except asyncio.CancelledError:
        if is_stopping and task is not None and not task.uncancel():
            raise StopRequested from None
        raise
    finally:
        giving_up.cancel()


def allow_many_files() -> int:
    """Raise the soft limit of open files to the hard limit, and return it: a router has five files for each
    worker, and a worker has connections of unknown clients.

    The usual soft limit of 1,024 is for programs that use ``select``.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # no limit, or a lower limit of the system
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return FILES_UNLIMITED if soft == resource.RLIM_INFINITY else soft


@dataclass(frozen=True, slots=True)
class Descriptors:
    """How this process's file descriptors are shared between clients' connections and all else."""

    files_max: int
    """The limit of open files."""

    connections_max: int
    """The requested number of connections, or as many as fit."""

    numbers_max: int
    """Descriptors from this number on are reserved: the system assigns the lowest free one."""

    refused_max: int
    """How many reserved descriptors refused connections may hold until their clients have read the reason."""


def share_descriptors(connections_max: int, *, files_max: int | None = None) -> Descriptors:
    """Share the descriptors between at most ``connections_max`` connections and all else: workers, logs,
    files. A quarter is reserved for all else; half of that even while more connections arrive at once than
    are counted.
    """
    files_max = files_max or allow_many_files()
    kept = min(max(FILES_KEPT_MIN, min(files_max // 4, FILES_KEPT_MAX)), files_max // 2)
    fitting = min(connections_max, files_max - kept)
    return Descriptors(files_max, fitting, files_max - kept // 2, min(kept // 4, REFUSED_MAX))


def descriptors_for(connections_max: int | None, *, files_max: int | None = None) -> Descriptors:
    """Share the descriptors for a frontend and log the result. ``connections_max`` is the requested number,
    None for as many as fit; a warning is logged when fewer fit.
    """
    limits = share_descriptors(connections_max or CONNECTIONS_MAX, files_max=files_max)
    fitting, files_max = limits.connections_max, limits.files_max
    log_event(logger, Event.FILES_MAX, files_max=files_max, connections_max=fitting)
    if connections_max is not None and fitting < connections_max:
        detail = (
            f"{connections_max} connections do not fit into a limit of {files_max} open files: {fitting} do"
        )
        log_event(logger, Event.CONFIG_WARNING, detail=detail)
    return limits


def settle_memory() -> None:
    """Exempt loaded objects from garbage collection, so that tokenizers and tables are not walked again and
    again; map large short-lived blocks, such as request bodies, separately. Move memory to huge pages in a
    thread that nobody waits for, as the move may take a second.
    """
    map_large_blocks()
    gc.collect()
    gc.freeze()
    threading.Thread(target=use_huge_pages, name="kvrouter-memory", daemon=True).start()


class CannotListen(KvrouterError):
    """The configured address is not available; the message names the setting to change."""

    code = "cannot_listen"


@asynccontextmanager
async def claimed(host: str, port: int) -> AsyncIterator[list[socket.socket]]:
    """Yield sockets bound to each address of ``host`` (port 0: any free one), closed at the end.

    They do not listen yet: until the server starts, connections are refused at once. Raises CannotListen.
    """
    sockets: list[socket.socket] = []
    try:
        with explained(host, port):
            loop = asyncio.get_running_loop()
            found = await loop.getaddrinfo(
                host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            for family, kind, protocol, _, address in dict.fromkeys(found):
                sock = socket.socket(family, kind, protocol)
                sockets.append(sock)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                sock.bind(address)
        yield sockets
    finally:
        for sock in sockets:
            sock.close()


@contextmanager
def explained(host: str, port: int) -> Iterator[None]:
    """Turn the system's error about an address into a CannotListen."""
    try:
        yield
    except OSError as error:
        raise CannotListen(_why(host, port, error)) from error


def _why(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is taken: choose another with --http-port"
    if error.errno == errno.EACCES:
        return f"port {port} on {host} is not for this user: choose another with --http-port"
    return f"cannot listen on {host}: {error.strerror or error}: choose another address with --http-host"

"""The file of ``router_learned_file``: speeds of links and ranks, kept over restarts."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Annotated, Final

import msgspec

from kvrouter.app.atomic_file import check_folder, write_atomic
from kvrouter.core.errors import ConfigError
from kvrouter.core.files import read_regular
from kvrouter.core.ids import RouterId
from kvrouter.core.json import parsed_counted
from kvrouter.core.replica_messages import LinkUpdate
from kvrouter.kernel.placement.kept_speeds import KeptSpeeds
from kvrouter.router.router_service import RouterService
from kvrouter.settings.router_settings import KvRouterConfig
from kvrouter.telemetry import Event, log_event
from kvrouter.transports.background import spawn

logger = logging.getLogger("kvrouter.router")

SAVE_S = 30.0
"""Seconds between two writes of the file."""

FILE_MAX_BYTES: Final = 64 * 1024 * 1024
"""The largest file that is read."""

VERSION: Final = 2
"""The version of :class:`LearnedFile`; it grows with each change of what the file has, at any depth."""

_NO_ROUTER = RouterId("")


class _Versioned(msgspec.Struct):
    version: int


class LearnedFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file's content: the speeds at ``saved_at_s``, in seconds since 1970."""

    version: int
    saved_at_s: Annotated[float, msgspec.Meta(ge=0.0)]
    links: tuple[LinkUpdate, ...]
    speeds: tuple[KeptSpeeds, ...] = ()
    """Those of ranks, by model."""


@asynccontextmanager
async def keeping_learned(
    config: KvRouterConfig,
    service: RouterService,
    *,
    save_s: float = SAVE_S,
    clock: Callable[[], float] = time.time,
) -> AsyncIterator[None]:
    """Give the router the file's speeds; write the file periodically, and at the end.

    Raises ConfigError where the file cannot be written. A file that cannot be read is logged and ignored.
    """
    if config.router_learned_file is None:
        yield
        return
    path = Path(config.router_learned_file)
    try:
        check_folder(path)
    except ConfigError as error:
        raise ConfigError(f"router_learned_file: {error.message}", param="router_learned_file") from error
    found = await asyncio.to_thread(_read, path)
    if found is not None:
        service.learned.recall(found.links, found.speeds, aged_s=max(0.0, clock() - found.saved_at_s))
    stopping = asyncio.Event()
    saving = spawn(_save_on(path, service, save_s, clock, stopping), name="speeds: keep what is learned")
    try:
        yield
    finally:
        stopping.set()
        await saving


async def _save_on(
    path: Path,
    service: RouterService,
    save_s: float,
    clock: Callable[[], float],
    stopping: asyncio.Event,
) -> None:
    """Write the file periodically and once more at the end, one write at a time."""
    refused: str | None = None
    is_over = False
    while not is_over:
        with suppress(TimeoutError):
            is_over = await asyncio.wait_for(stopping.wait(), save_s)
        refused = await _save(path, service, clock, refused=refused)


async def _save(
    path: Path, service: RouterService, clock: Callable[[], float], *, refused: str | None = None
) -> str | None:
    """Write the file; return the error, or None. An error equal to ``refused`` is not logged again."""
    links, speeds = tuple(service.learned.links(_NO_ROUTER)), tuple(service.learned.speeds())
    content = msgspec.json.encode(LearnedFile(VERSION, clock(), links, speeds))
    try:
        await asyncio.to_thread(write_atomic, path, content)
    except ConfigError as error:
        if error.message != refused:
            log_event(logger, Event.LEARNED_NOT_KEPT, reason=error.message)
        return error.message
    return None


def _read(path: Path) -> LearnedFile | None:
    try:
        content = read_regular(path, bytes_max=FILE_MAX_BYTES)
        version = parsed_counted(msgspec.json.Decoder(_Versioned), content).version
        if version != VERSION:
            raise ValueError(f"another version of kvrouter wrote it: version {version}, {VERSION} is read")
        return parsed_counted(msgspec.json.Decoder(LearnedFile), content)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        log_event(logger, Event.LEARNED_NOT_READ, reason=f"{path}: {why}")
        return None

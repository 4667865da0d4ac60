"""The file of ``router_learned_file``: what is known of links, kept over restarts."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

from kvrouter.app.whole_file import check_folder, write_whole
from kvrouter.core.errors import ConfigError
from kvrouter.core.files import read_regular
from kvrouter.core.ids import RouterId
from kvrouter.core.json import parsed_counted
from kvrouter.core.sync import LinkNews
from kvrouter.router.router import RouterService
from kvrouter.settings.router import KvRouterConfig
from kvrouter.telemetry import Event, log_event
from kvrouter.transports.background import spawn

logger = logging.getLogger("kvrouter.router")

SAVE_S = 30.0
"""How often the file is written."""

FILE_MAX_BYTES: Final = 64 * 1024 * 1024
"""A larger file is not read."""

_NOBODY = RouterId("")


class LearnedFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the file says: at that moment, in seconds since 1970, so much was known of links."""

    version: Literal[1]
    saved_at_s: Annotated[float, msgspec.Meta(ge=0.0)]
    links: tuple[LinkNews, ...]


@asynccontextmanager
async def keeping(
    config: KvRouterConfig,
    service: RouterService,
    *,
    save_s: float = SAVE_S,
    clock: Callable[[], float] = time.time,
) -> AsyncIterator[None]:
    """Let the router know what the file says, and write it again and again, and at the end.

    Raises ConfigError where it could never be written. A file that cannot be read is left out, and said.
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
        service.recall(found.links, aged_s=max(0.0, clock() - found.saved_at_s))
    stopping = asyncio.Event()
    saving = spawn(_save_on(path, service, save_s, clock, stopping), name="links: keep what is learned")
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
    """Write the file again and again, and once more at the end: one write at a time."""
    refused: str | None = None
    is_over = False
    while not is_over:
        with suppress(TimeoutError):
            is_over = await asyncio.wait_for(stopping.wait(), save_s)
        refused = await _save(path, service, clock, refused=refused)


async def _save(
    path: Path, service: RouterService, clock: Callable[[], float], *, refused: str | None = None
) -> str | None:
    """Write the file; return why that failed. A reason that was given before is not said again."""
    links = list(service.known_links(_NOBODY))
    content = msgspec.json.encode(LearnedFile(1, clock(), tuple(links)))
    try:
        await asyncio.to_thread(write_whole, path, content)
    except ConfigError as error:
        if error.message != refused:
            log_event(logger, Event.LEARNED_NOT_KEPT, reason=error.message)
        return error.message
    return None


def _read(path: Path) -> LearnedFile | None:
    try:
        return parsed_counted(msgspec.json.Decoder(LearnedFile), read_regular(path, bytes_max=FILE_MAX_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        log_event(logger, Event.LEARNED_NOT_READ, reason=f"{path}: {why}")
        return None

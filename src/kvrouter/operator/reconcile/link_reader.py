"""Reads what frontends learned of links: one of each deployment, now and then, apart from reconciling."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import aiohttp

from kvrouter.core.http_client import HttpClient
from kvrouter.kube.objects import Key
from kvrouter.operator.api.status import DeploymentStatus, LinkStatus
from kvrouter.operator.status.links import LINK_SERIES, Door, read_links, steadied

READ_AGAIN_S = 30.0
"""How long after one round of reading the next one begins."""

KEPT_S = 300.0
"""For how long links are shown that cannot be read again."""

READ_LIMIT_S = 5.0
"""A frontend may let a client wait for its next page: it spends a tenth of its time on them."""

PAGES_MAX = 8
"""So many frontends are read at a time."""

PAGE_BYTES_MAX = 16 << 20
HELD_BYTES_MAX = 1 << 20
"""Of what a page may have in all, so much is held here: its lines on links, and a line that has not ended."""

CHUNK_BYTES = 1 << 16

ReadPage = Callable[[Door], Awaitable[tuple[LinkStatus, ...] | None]]


async def read_page(door: Door) -> tuple[LinkStatus, ...] | None:
    """Return the links on the page of metrics of a frontend; None when it cannot be read whole in time."""
    try:
        async with (
            HttpClient(
                limits=aiohttp.ClientTimeout(total=READ_LIMIT_S),
                headers={"Accept-Encoding": "identity", "Connection": "close"},
                auto_decompress=False,
            ) as client,
            await client.request("GET", door.metrics) as answer,
        ):
            if answer.status != 200:
                return None
            lines = await _link_lines(answer.content)
    except (aiohttp.ClientError, TimeoutError, OSError):
        return None
    return None if lines is None else read_links(lines)


async def _link_lines(page: aiohttp.StreamReader) -> list[bytes] | None:
    """The lines of a page that speak of links; None for a page that is too long."""
    prefix = LINK_SERIES.encode()
    kept, rest = list[bytes](), b""
    read_bytes = kept_bytes = 0
    async for chunk in page.iter_chunked(CHUNK_BYTES):
        *lines, rest = (rest + chunk).split(b"\n")
        found = [line for line in lines if line.startswith(prefix)]
        kept += found
        kept_bytes += sum(map(len, found))
        read_bytes += len(chunk)
        if read_bytes > PAGE_BYTES_MAX or kept_bytes + len(rest) > HELD_BYTES_MAX:
            return None
    return [*kept, rest]


@dataclass(slots=True)
class _Followed:
    """One deployment: what is shown of it, when that was read, and where it is read."""

    shown: tuple[LinkStatus, ...]
    read_s: float
    door: Door | None = None


class LinkReader:
    """What one frontend of each deployment that is followed learned of links.

    ``changed`` is called with a deployment when what there is to show of it becomes something else.
    """

    def __init__(
        self, changed: Callable[[Key], None], *, clock: Callable[[], float], read_page: ReadPage = read_page
    ) -> None:
        self._changed, self._clock, self._read_page = changed, clock, read_page
        self._followed: dict[Key, _Followed] = {}

    def follow(self, key: Key, door: Door | None, before: DeploymentStatus | None) -> tuple[LinkStatus, ...]:
        """Read a deployment's links at ``door`` from now on, and return what there is to show of them.

        Without a door nothing is read. A deployment that is new here shows what its status had ``before``,
        which another leader wrote.
        """
        followed = self._followed.get(key)
        if followed is None:
            shown = (before or DeploymentStatus()).links or ()
            followed = self._followed[key] = _Followed(shown, self._clock())
        followed.door = door
        return followed.shown

    def forget(self, key: Key) -> None:
        """The deployment at ``key`` is gone, or another operator's."""
        self._followed.pop(key, None)

    async def read(self) -> None:
        """Read every deployment once. One that cannot be read keeps what was read last for 300 s."""
        turns = asyncio.Semaphore(PAGES_MAX)
        async with asyncio.TaskGroup() as group:
            for key, followed in self._followed.items():
                group.create_task(self._read_one(key, followed, turns))

    async def _read_one(self, key: Key, followed: _Followed, turns: asyncio.Semaphore) -> None:
        links = None
        if followed.door is not None:
            async with turns:
                links = await self._read_page(followed.door)
        if self._followed.get(key) is not followed:
            return  # it was forgotten meanwhile
        if links is not None:
            followed.read_s = self._clock()
        elif self._clock() - followed.read_s < KEPT_S:
            return
        shown = steadied(followed.shown, links or ())
        if shown != followed.shown:
            followed.shown = shown
            self._changed(key)

"""Reads what frontends learned of links and workers, from one of each deployment, apart from reconciling."""

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NamedTuple

import aiohttp

from kvrouter.core.http_client import HttpClient
from kvrouter.kube.objects import Key
from kvrouter.operator.api.status import DeploymentStatus, LinkStatus
from kvrouter.operator.status.link_status import LINK_SERIES, MetricsEndpoint, read_links, steadied

READ_AGAIN_S = 30.0
"""The pause between two rounds of reading."""

KEPT_S = 300.0
"""How long a reading is used that cannot be repeated."""

READ_LIMIT_S = 5.0
"""How long a page may take: a frontend delays pages, and spends a tenth of its time on them."""

PAGES_MAX = 8
"""How many frontends are read at a time."""

PAGE_BYTES_MAX = 16 << 20
HELD_BYTES_MAX = 1 << 20
"""How much of a page is held: its lines on links and open circuits, and the unfinished line."""

CHUNK_BYTES = 1 << 16

_OPEN_CIRCUIT = re.compile(
    rb'kvrouter_worker_circuit\{(?=[^}]*state="(?:open|half_open)")(?=[^}]*worker="([0-9]{1,20})")'
    rb"[^}]*\} 1\.0\r?"
)


class FrontendReading(NamedTuple):
    """What a frontend learned: its links, and the ids of workers whose circuit is open: it passes them over,
    since requests or KV transfers failed there. None if nobody could read it yet.
    """

    links: tuple[LinkStatus, ...] = ()
    passed_over: frozenset[int] | None = frozenset()


ReadPage = Callable[[MetricsEndpoint], Awaitable[FrontendReading | None]]


async def read_page(endpoint: MetricsEndpoint) -> FrontendReading | None:
    """Return what is on a frontend's page of metrics; None if it cannot be read whole in time."""
    try:
        async with (
            HttpClient(
                limits=aiohttp.ClientTimeout(total=READ_LIMIT_S),
                headers={"Accept-Encoding": "identity", "Connection": "close"},
                auto_decompress=False,
            ) as client,
            await client.request("GET", endpoint.url) as answer,
        ):
            if answer.status != 200:
                return None
            lines = await _lines(answer.content)
    except (aiohttp.ClientError, TimeoutError, OSError):
        return None
    if lines is None:
        return None
    circuits = filter(None, map(_OPEN_CIRCUIT.fullmatch, lines))
    return FrontendReading(read_links(lines), frozenset(int(circuit[1]) for circuit in circuits))


async def _lines(page: aiohttp.StreamReader) -> list[bytes] | None:
    """Return the lines of a page on links and open circuits; None if the page is too long."""
    prefix = LINK_SERIES.encode()
    kept, rest = list[bytes](), b""
    read_bytes = kept_bytes = 0
    async for chunk in page.iter_chunked(CHUNK_BYTES):
        *lines, rest = (rest + chunk).split(b"\n")
        found = [line for line in lines if line.startswith(prefix) or _OPEN_CIRCUIT.fullmatch(line)]
        kept += found
        kept_bytes += sum(map(len, found))
        read_bytes += len(chunk)
        if read_bytes > PAGE_BYTES_MAX or kept_bytes + len(rest) > HELD_BYTES_MAX:
            return None
    return [*kept, rest]


@dataclass(slots=True)
class _Followed:
    """One deployment: the reading that is shown, its time, and where it is read."""

    shown: FrontendReading
    read_s: float
    endpoint: MetricsEndpoint | None = None


class FrontendReader:
    """Reads what one frontend of each followed deployment learned.

    ``changed`` is called with a deployment when its shown reading changes.
    """

    def __init__(
        self, changed: Callable[[Key], None], *, clock: Callable[[], float], read_page: ReadPage = read_page
    ) -> None:
        self._changed, self._clock, self._read_page = changed, clock, read_page
        self._followed: dict[Key, _Followed] = {}

    def follow(
        self, key: Key, endpoint: MetricsEndpoint | None, before: DeploymentStatus | None
    ) -> FrontendReading:
        """Read a deployment's frontend at ``endpoint`` from now on, and return the reading to show.

        With None nothing is read. A deployment that is new here shows the links of ``before``, its last
        status, which another leader wrote; which workers are passed over is unknown.
        """
        followed = self._followed.get(key)
        if followed is None:
            shown = FrontendReading((before or DeploymentStatus()).links or (), passed_over=None)
            followed = self._followed[key] = _Followed(shown, self._clock())
        followed.endpoint = endpoint
        return followed.shown

    def forget(self, key: Key) -> None:
        """The deployment at ``key`` is gone, or another operator's."""
        self._followed.pop(key, None)

    async def read(self) -> None:
        """Read every deployment once. A reading that cannot be repeated, and an unknown one, stay for 300 s;
        then they count as empty.
        """
        turns = asyncio.Semaphore(PAGES_MAX)
        async with asyncio.TaskGroup() as group:
            for key, followed in self._followed.items():
                group.create_task(self._read_one(key, followed, turns))

    async def _read_one(self, key: Key, followed: _Followed, turns: asyncio.Semaphore) -> None:
        reading = None
        if followed.endpoint is not None:
            async with turns:
                reading = await self._read_page(followed.endpoint)
        if self._followed.get(key) is not followed:
            return  # it was forgotten meanwhile
        if reading is not None:
            followed.read_s = self._clock()
        elif self._clock() - followed.read_s < KEPT_S:
            return
        found = reading or FrontendReading()
        shown = found._replace(links=steadied(followed.shown.links, found.links))
        if shown != followed.shown:
            followed.shown = shown
            self._changed(key)

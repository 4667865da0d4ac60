"""A page of metrics that a test writes, on a port of its own."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web

from tests.testing.asyncio_servers import port_of, serving


async def empty(_request: web.Request) -> web.Response:
    """A page without metrics."""
    return web.Response(text="")


@asynccontextmanager
async def metrics_page(
    answer: Callable[[web.Request], Awaitable[web.StreamResponse]] = empty,
) -> AsyncIterator[int]:
    """Serve ``/metrics`` until the block ends; yield the port."""
    app = web.Application()
    app.router.add_get("/metrics", answer)
    async with serving(app) as server:
        yield port_of(server)

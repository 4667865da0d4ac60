"""Servers of one loop, which end so that no connection is left open.

Python 3.11 loses a connection that it accepts just before its listener is closed: its transport, made a turn
of the loop later, fails an assertion of the closed ``asyncio.Server`` and is never closed. The garbage
collector finds it, in whatever test that happens.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

from aiohttp import web

StreamHandler: TypeAlias = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def port_of(server: asyncio.Server) -> int:
    """Where a server listens."""
    port: int = server.sockets[0].getsockname()[1]
    return port


async def stop_listening(server: asyncio.Server) -> None:
    """Close a listener once each connection that it accepted has its handler, over TLS once it has begun to
    greet. Idempotent.
    """
    for listener in server.sockets:
        asyncio.get_running_loop().remove_reader(listener)
    for _ in range(3):  # one each until the transport is made, the protocol has it, the handler's task began
        await asyncio.sleep(0)
    server.close()


@asynccontextmanager
async def serving(
    app: web.Application, port: int = 0, *, tls: ssl.SSLContext | None = None, **options: Any
) -> AsyncIterator[asyncio.Server]:
    """Serve ``app``; at the end every connection is closed. A handler is cancelled once its client leaves.
    ``options`` are those of ``web.AppRunner``.
    """
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, **options)
    await runner.setup()
    assert runner.server is not None
    try:
        server = await asyncio.get_running_loop().create_server(runner.server, "127.0.0.1", port, ssl=tls)
        try:
            yield server
        finally:
            await stop_listening(server)
    finally:
        await runner.cleanup()


@asynccontextmanager
async def serving_streams(handler: StreamHandler, **options: Any) -> AsyncIterator[asyncio.Server]:
    """Serve each connection by ``handler``, and close it once that returns. At the end, handlers that run are
    cancelled, and their connections reset. ``options`` are those of ``asyncio.start_server``.
    """
    running: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        running.add(task)
        try:
            await handler(reader, writer)
        except asyncio.CancelledError:
            writer.transport.abort()
        finally:
            running.discard(task)
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0, **options)
    try:
        yield server
    finally:
        await stop_listening(server)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

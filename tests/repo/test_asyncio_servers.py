"""A server that ends leaves no connection open, in whatever turn of the loop it accepted it."""

import asyncio
import socket

import pytest
from aiohttp import web

from tests.testing.asyncio_servers import port_of, serving, serving_streams
from tests.testing.asyncio_transports import track_transports


async def read(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
    await reader.read()


SERVERS = {"http": lambda: serving(web.Application()), "streams": lambda: serving_streams(read)}


@pytest.mark.parametrize("turns", range(7))
@pytest.mark.parametrize("kind", SERVERS)
async def test_connection_accepted_as_a_server_ends_is_closed(kind: str, turns: int) -> None:
    with track_transports() as transports:
        async with SERVERS[kind]() as server:
            client = socket.create_connection(("127.0.0.1", port_of(server)))
            for _ in range(turns):
                await asyncio.sleep(0)
        with client:
            await transports.until_ended(limit_s=1.0)

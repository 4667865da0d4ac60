"""The server that tests of NATS start."""

import asyncio

import nats

from tests.testing.nats_server import NatsServer, running_nats


async def test_a_stream_outlives_a_kill_and_a_restart(own_nats: NatsServer) -> None:
    url = own_nats.url
    client = await nats.connect(url)
    stream = client.jetstream()
    await stream.add_stream(name="s", subjects=["s.>"])
    await stream.publish("s.x", b"1")
    await client.close()
    own_nats.restart()
    assert own_nats.url == url
    client = await nats.connect(url)
    assert (await client.jetstream().stream_info("s")).state.messages == 1
    await client.close()


async def test_a_server_with_a_token_refuses_clients_without_it() -> None:
    with running_nats(token="t0p") as server:
        client = await nats.connect(server.url)
        await client.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"CONNECT {}\r\nPING\r\n")
        assert (await reader.readline()).startswith(b"INFO")
        assert b"Authorization Violation" in await reader.readline()
        writer.close()
        await writer.wait_closed()


async def test_the_shared_server_answers(shared_nats: NatsServer) -> None:
    client = await nats.connect(shared_nats.url)
    assert client.is_connected
    await client.close()

"""Networks that fall apart while every process lives: connections stay open, and nothing passes."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from tests.testing.fleet_checks import wait_until_consistent
from tests.testing.fleet_processes import FleetProcesses
from tests.testing.nats_server import NatsServer
from tests.testing.processes import Frontend, eventually, fleet, free_ports
from tests.testing.streaming_client import StreamingClient
from tests.testing.tcp_proxy import TcpProxy

FLEET = """
version: 1
models: [{name: mock, block_size: 64}]
workers:
  - {name: worker, replicas: 2, engine: {
      timing: {decode_base: 20, decode_linear: 0, decode_quadratic: 0}}}
"""
BEHIND = "127.0.0.2"
"""Under this address workers are reached, through proxies; they listen on 127.0.0.1, at the same ports."""

LONG_TOKENS = 400
"""Eight seconds: it goes on when its worker is cut off."""


@asynccontextmanager
async def proxies(ports: Sequence[int], *, host: str = "127.0.0.1") -> AsyncIterator[list[TcpProxy]]:
    """A proxy before each port of this machine; at the same ports where ``host`` is another address."""
    async with AsyncExitStack() as stack:
        made = []
        for port in ports:
            proxy = TcpProxy("127.0.0.1", port, listen_host=host)
            await proxy.start(0 if host == "127.0.0.1" else port)
            stack.push_async_callback(proxy.close)
            made.append(proxy)
        yield made


async def worker_of(frontend: Frontend, worker_id: int) -> dict[str, object]:
    """What a frontend says of a worker."""
    page = await frontend.fleet()
    (found,) = (each for each in page["workers"] if each["worker_id"] == worker_id)
    return dict(found)


async def says(frontend: Frontend, worker_id: int, key: str, value: object) -> bool:
    return (await worker_of(frontend, worker_id))[key] == value


@pytest.mark.parametrize("request_plane", ["tcp", "http"])
async def test_a_partitioned_worker_costs_no_answer_and_comes_back(
    request_plane: str, record_property: Callable[[str, object], None]
) -> None:
    settings = {
        "KVROUTER_ADVERTISE_HOST": BEHIND,
        "DYN_REQUEST_PLANE": request_plane,
    }
    async with AsyncExitStack() as stack:
        between: dict[int, list[TcpProxy]] = {}
        ports = {worker_id: free_ports(3) for worker_id in (1, 2)}
        for worker_id, port in ports.items():
            between[worker_id] = await stack.enter_async_context(proxies(range(port, port + 3), host=BEHIND))
        processes = await stack.enter_async_context(fleet(settings))
        here = await FleetProcesses.begin(
            processes,
            FLEET,
            environs={each: {"KVROUTER_LISTEN_PORT": str(port)} for each, port in ports.items()},
        )
        frontend = here.frontends[0]
        client = StreamingClient(frontend, max_tokens=LONG_TOKENS)
        await client.until(pieces=3)
        cut_off = (await client.workers())["decode"]
        for proxy in between[cut_off]:
            proxy.pause()
        cut_unix_s = time.time()
        assert (await client.end()).is_whole, client.error
        record_property("sent elsewhere after s", round(await client.sent_again_after_s(cut_unix_s), 2))
        for each in here.frontends:
            await eventually(lambda door=each: says(door, cut_off, "alive", False))
        later = [await StreamingClient(each, max_tokens=8).end() for each in here.frontends]
        assert all(each.is_whole for each in later), [each.error for each in later]
        for proxy in between[cut_off]:
            proxy.resume()
        back_s = asyncio.get_running_loop().time()
        await here.is_well([client.prompt, *(each.prompt for each in later)])
        record_property("well after s", round(asyncio.get_running_loop().time() - back_s, 2))


async def test_a_frontend_cut_off_from_nats_serves_its_known_fleet(own_nats: NatsServer) -> None:
    async with (
        proxies([own_nats.port]) as (proxy,),
        fleet(
            {"NATS_SERVER": own_nats.url, "DYN_DISCOVERY_BACKEND": "nats", "KVROUTER_LEASE_S": "2"}
        ) as processes,
    ):
        here = await FleetProcesses.begin(processes, FLEET, frontends=1)
        cut_off = await here.start_frontend(
            "cut-off", environ={"NATS_SERVER": f"nats://127.0.0.1:{proxy.port}"}
        )
        await here.is_well()
        proxy.pause()

        async def is_frozen() -> bool:
            return not (await cut_off.fleet())["discovery"]["reachable"]

        await eventually(is_frozen)
        clients = [await StreamingClient(each, max_tokens=8).end() for each in here.frontends]
        assert all(each.is_whole for each in clients), [each.error for each in clients]
        page = await cut_off.fleet()
        assert [each["alive"] for each in page["workers"]] == [True, True]
        proxy.resume()
        await here.is_well([each.prompt for each in clients])


@pytest.mark.parametrize("flags", [(), ("--enable-local-indexer",)], ids=["jetstream", "core"])
async def test_a_worker_cut_off_from_nats_is_kept_while_it_answers(
    flags: tuple[str, ...], own_nats: NatsServer
) -> None:
    async with (
        proxies([own_nats.port]) as (proxy,),
        fleet(
            {"NATS_SERVER": own_nats.url, "DYN_DISCOVERY_BACKEND": "nats", "KVROUTER_LEASE_S": "2"}
        ) as processes,
    ):
        behind = {1: {"NATS_SERVER": f"nats://127.0.0.1:{proxy.port}"}}
        here = await FleetProcesses.begin(processes, FLEET, flags=flags, environs=behind)
        proxy.pause()
        for each in here.frontends:
            await eventually(lambda door=each: says(door, 1, "lapsed", True))
        await here.workers[2].kill()
        clients = [await StreamingClient(each, max_tokens=8).end() for each in here.frontends]
        assert all(each.is_whole for each in clients), [each.error for each in clients]
        assert {(await each.workers())["decode"] for each in clients} == {1}, "the cut-off worker serves"
        await here.start_worker(2)
        proxy.resume()
        await here.is_well([each.prompt for each in clients])


@pytest.mark.parametrize("request_plane", ["tcp", "http", "nats"])
async def test_a_paused_worker_costs_no_answer_and_comes_back(
    request_plane: str, shared_nats: NatsServer, record_property: Callable[[str, object], None]
) -> None:
    settings = {
        "NATS_SERVER": shared_nats.url,
        "DYN_REQUEST_PLANE": request_plane,
        "KVROUTER_LEASE_S": "30",
    }
    async with fleet(settings) as processes:
        here = await FleetProcesses.begin(processes, FLEET)
        client = StreamingClient(here.frontends[0], max_tokens=LONG_TOKENS)
        await client.until(pieces=3)
        hung = (await client.workers())["decode"]
        here.workers[hung].pause()
        hung_unix_s = time.time()
        assert (await client.end()).is_whole, client.error
        record_property("sent elsewhere after s", round(await client.sent_again_after_s(hung_unix_s), 2))
        for each in here.frontends:
            await eventually(lambda door=each: says(door, hung, "alive", False))
        later = [await StreamingClient(each, max_tokens=8).end() for each in here.frontends]
        assert all(each.is_whole for each in later), [each.error for each in later]
        here.workers[hung].resume()
        await here.is_well([client.prompt, *(each.prompt for each in later)])


@pytest.mark.parametrize("request_plane", ["tcp", "http", "nats"])
async def test_a_paused_frontends_bookings_are_released_by_the_others(
    request_plane: str, shared_nats: NatsServer
) -> None:
    settings = {
        "NATS_SERVER": shared_nats.url,
        "DYN_REQUEST_PLANE": request_plane,
        "DYN_ROUTER_REPLICA_SYNC": "true",
    }
    async with fleet(settings) as processes:
        here = await FleetProcesses.begin(processes, FLEET)
        hung, other = here.frontends
        client = StreamingClient(hung, max_tokens=1000)
        await client.until(pieces=3)
        hung.pause()
        await wait_until_consistent(processes, [other], workers=len(here.workers))
        assert not client.has_ended
        hung.resume()
        assert (await client.end()).is_whole, client.error
        await here.is_well([client.prompt])

"""Connections of the tcp request plane: how many, how long, and what refuses them."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from typing import cast

import pytest
import trustme

from kvrouter.core.backoff import Backoff
from kvrouter.core.errors import ConfigError
from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.core.requests import EngineChunk, FinishReason
from kvrouter.transports.requests.port import StreamBroken, WorkerUnreachable
from kvrouter.transports.requests.session import RouterLimits
from kvrouter.transports.requests.tcp import TcpRequestAcceptor, TcpRequestTransport
from kvrouter.transports.requests.tcp import transport as transport_module
from kvrouter.transports.requests.tcp.transport import RouterPipe
from tests.testing.constants import SetConstants
from tests.testing.request_transports import TOKEN
from tests.testing.scripted_worker import IN_TIME_S, ScriptedWorker, accepted, leg, read_all
from tests.testing.tcp_peers import LoopErrors, RawWorkers
from tests.testing.tcp_proxy import TcpProxy


@pytest.fixture
async def acceptor() -> AsyncIterator[TcpRequestAcceptor]:
    of = TcpRequestAcceptor("127.0.0.1", token=TOKEN)
    await of.start()
    yield of
    await of.close()


async def answers(
    setup: TcpRequestTransport, worker: ScriptedWorker, address: str, name: str = "x"
) -> list[int]:
    """What one leg brings, from its request to its end."""
    stream = await accepted(setup, address, leg(name))
    worker.streams[-1].chunks.put_nowait(EngineChunk((4, 5), finish=FinishReason.STOP))
    return (await read_all(stream))[0]


async def test_many_requests_at_once_share_one_connection(acceptor: TcpRequestAcceptor) -> None:
    address = acceptor.address_of(WorkerId(1), Epoch(1))
    acceptor.serve(address, ScriptedWorker())
    async with TcpProxy("127.0.0.1", acceptor.port) as proxy:
        behind = address.replace(str(acceptor.port), str(proxy.port))
        setup = TcpRequestTransport(token=TOKEN)
        await asyncio.gather(*(accepted(setup, behind, leg(str(n))) for n in range(50)))
        setup.follow(behind, lambda _: None)
        await accepted(setup, behind, leg("last"))
        assert proxy.n_accepted == 1
        await setup.close()


async def test_a_leg_is_written_before_its_caller_goes_on(acceptor: TcpRequestAcceptor) -> None:
    address = acceptor.address_of(WorkerId(1), Epoch(1))
    acceptor.serve(address, ScriptedWorker())
    plane = TcpRequestTransport(token=TOKEN)
    (await plane.open(address, leg())).cancel("it made the connection")
    await asyncio.sleep(0)
    await plane.open(address, leg("second"))
    (link,) = plane._links.values()
    assert link.open_pipe is not None
    assert link.open_pipe.session.waiting_bytes == 0
    await plane.close()


async def test_workers_behind_one_listener_are_addressed_separately(acceptor: TcpRequestAcceptor) -> None:
    workers = [ScriptedWorker() for _ in range(3)]
    addresses = [acceptor.address_of(WorkerId(n), Epoch(1)) for n in range(3)]
    for address, worker in zip(addresses, workers, strict=True):
        acceptor.serve(address, worker)
    with pytest.raises(ConfigError, match="served already"):
        acceptor.serve(addresses[0], workers[0])
    setup = TcpRequestTransport(token=TOKEN)
    for n in (2, 0, 1):
        assert await answers(setup, workers[n], addresses[n]) == [4, 5]
    assert [len(worker.requests) for worker in workers] == [1, 1, 1]
    await setup.close()


async def test_new_incarnation_at_a_port_gets_no_requests_for_the_old_one(
    acceptor: TcpRequestAcceptor,
) -> None:
    old, new = [acceptor.address_of(WorkerId(1), Epoch(incarnation)) for incarnation in (1, 2)]
    registration = acceptor.serve(old, ScriptedWorker())
    setup = TcpRequestTransport(token=TOKEN)
    await accepted(setup, old, leg())
    registration.leave("a rolling restart")
    worker = ScriptedWorker()
    acceptor.serve(new, worker)
    for why in ("a rolling restart", "not served here"):
        with pytest.raises(WorkerUnreachable, match=why):
            await accepted(setup, old, leg("y"))
    assert await answers(setup, worker, new) == [4, 5]
    await setup.close()


async def test_unused_connection_is_closed_and_opened_again_on_use(acceptor: TcpRequestAcceptor) -> None:
    address = acceptor.address_of(WorkerId(1), Epoch(1))
    worker = ScriptedWorker()
    acceptor.serve(address, worker)
    async with TcpProxy("127.0.0.1", acceptor.port) as proxy:
        behind = address.replace(str(acceptor.port), str(proxy.port))
        setup = TcpRequestTransport(token=TOKEN, limits=RouterLimits(heartbeat_s=0.02, idle_close_s=0.1))
        assert await answers(setup, worker, behind) == [4, 5]
        async with asyncio.timeout(IN_TIME_S):
            while proxy.n_open:
                await proxy.changed()
        assert await answers(setup, worker, behind, "y") == [4, 5]
        assert proxy.n_accepted == 2
        await setup.close()


async def test_worker_that_reconnects_at_once_is_not_reported_dead(
    acceptor: TcpRequestAcceptor, set_constants: SetConstants
) -> None:
    """Else a moment's trouble with the network makes a whole fleet ineligible."""
    set_constants(transport_module, COMES_BACK_WITHIN_S=IN_TIME_S)
    address = acceptor.address_of(WorkerId(1), Epoch(1))
    worker = ScriptedWorker()
    acceptor.serve(address, worker)
    async with TcpProxy("127.0.0.1", acceptor.port) as proxy:
        behind = address.replace(str(acceptor.port), str(proxy.port))
        setup = TcpRequestTransport(token=TOKEN)
        reported: list[bool] = []
        setup.follow(behind, reported.append)
        stream = await accepted(setup, behind, leg())
        proxy.cut()
        with pytest.raises(StreamBroken):
            await read_all(stream)
        assert await answers(setup, worker, behind, "y") == [4, 5]
        assert (proxy.n_accepted, False in reported) == (2, False)
        await setup.close()


async def test_lost_worker_is_retried_less_and_less_often() -> None:
    async with RawWorkers() as workers:
        setup = TcpRequestTransport(token=TOKEN, retry_first_s=0.01, retry_most_s=30.0)
        reported: list[bool] = []
        setup.follow(workers.address_of(), reported.append)
        loop = asyncio.get_running_loop()
        tried_s = []
        for _ in range(6):
            peer = await workers.next()
            tried_s.append(loop.time())
            await peer.close()
        assert reported == [False]
        assert tried_s[5] - tried_s[0] >= 0.005 + 0.01 + 0.02 + 0.04 + 0.08
        await setup.close()


class End:
    """A connection, as its link sees it."""

    def __init__(self) -> None:
        self.is_closed = False
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def lose(self) -> None:
        self.is_closed = True
        self.lost.set_result(None)


async def test_unused_address_is_forgotten() -> None:
    unused = asyncio.Event()
    ends: list[End] = []

    async def connect() -> RouterPipe:
        if len(ends) == 2:
            raise WorkerUnreachable("it is gone")
        ends.append(End())
        return cast("RouterPipe", ends[-1])

    def new_link() -> transport_module.TcpLink:
        unused.clear()
        return transport_module.TcpLink(connect, Backoff(60.0, 60.0), on_unused=unused.set)

    asked = new_link()
    await asked.connected()
    assert not unused.is_set()
    ends[0].lose()
    async with asyncio.timeout(IN_TIME_S):
        await unused.wait()

    followed = new_link()
    await followed.connected()
    end = followed.follow(lambda _: None)
    ends[1].lose()
    with pytest.raises(WorkerUnreachable):
        await followed.connected()
    assert not unused.is_set()
    end()
    assert unused.is_set()

    never_there = new_link()
    with pytest.raises(WorkerUnreachable):
        await never_there.connected()
    async with asyncio.timeout(IN_TIME_S):
        await unused.wait()


async def test_a_plane_can_be_closed_while_it_connects() -> None:
    mistakes = LoopErrors()
    unwatch = mistakes.watch()
    async with RawWorkers() as workers:
        setup = TcpRequestTransport(token=TOKEN)
        setup.follow(workers.address_of(1), lambda _: None)
        opening = asyncio.create_task(accepted(setup, workers.address_of(2), leg()))
        await workers.next()
        await setup.close()
        with pytest.raises(WorkerUnreachable, match="closed"):
            await opening
    assert mistakes.seen == []
    unwatch()


@pytest.mark.parametrize("address", ["tcp://", "http://127.0.0.1:1/1/1"])
async def test_invalid_address_is_unreachable_and_not_followed(address: str) -> None:
    setup = TcpRequestTransport(token=TOKEN)
    with pytest.raises(WorkerUnreachable):
        await accepted(setup, address, leg())
    with pytest.raises(WorkerUnreachable):
        setup.follow(address, lambda _: None)
    await setup.close()


async def test_address_without_a_worker_is_unreachable_and_not_alive() -> None:
    address = "tcp://127.0.0.1:1/1/1"
    setup = TcpRequestTransport(token=TOKEN)
    with pytest.raises(WorkerUnreachable):
        await accepted(setup, address, leg())
    heard: asyncio.Queue[bool] = asyncio.Queue()
    end = setup.follow(address, heard.put_nowait)
    async with asyncio.timeout(IN_TIME_S):
        assert await heard.get() is False
    end()
    await setup.close()


def test_wildcard_address_needs_an_advertised_host() -> None:
    with pytest.raises(ConfigError, match="advertise"):
        TcpRequestAcceptor("0.0.0.0", token=TOKEN)
    acceptor = TcpRequestAcceptor("0.0.0.0", 7001, token=TOKEN, advertise_host="node-7.example")
    assert acceptor.address_of(WorkerId(1), Epoch(2)) == "tcp://node-7.example:7001/1/2"


async def test_taken_port_is_a_config_error(acceptor: TcpRequestAcceptor) -> None:
    other = TcpRequestAcceptor("127.0.0.1", acceptor.port, token=TOKEN)
    with pytest.raises(ConfigError, match="cannot listen on"):
        await other.start()
    await other.close()


async def test_plaintext_router_reports_a_worker_that_expects_tls() -> None:
    why: asyncio.Queue[str] = asyncio.Queue()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    trustme.CA().issue_cert("127.0.0.1").configure_cert(context)
    acceptor = TcpRequestAcceptor("127.0.0.1", token=TOKEN, ssl=context)
    await acceptor.start()
    setup = TcpRequestTransport(token=TOKEN, connect_timeout_s=0.2, on_refused=why.put_nowait)
    setup.follow(acceptor.address_of(WorkerId(1), Epoch(1)), lambda _: None)
    async with asyncio.timeout(IN_TIME_S):
        assert "TLS" in await why.get()
    await setup.close()
    await acceptor.close()

"""How what frontends learned of links is read: whole and in time, or not at all."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from kvrouter.kube.objects import Key
from kvrouter.operator.api.status import DeploymentStatus, LinkStatus
from kvrouter.operator.reconcile import frontend_reader
from kvrouter.operator.reconcile.frontend_reader import (
    HELD_BYTES_MAX,
    KEPT_S,
    PAGE_BYTES_MAX,
    PAGES_MAX,
    FrontendReader,
    FrontendReading,
    read_page,
)
from kvrouter.operator.status.link_status import MetricsEndpoint
from kvrouter.telemetry import Telemetry
from tests.testing.asyncio_servers import port_of, serving_streams
from tests.testing.constants import SetConstants

LINK = LinkStatus(model="m", link="zone", bandwidth_bytes_per_second=10, latency_seconds=0.001, slow=False)
OTHER = LINK.model_copy(update={"slow": True})
SEEN, NOTHING = FrontendReading((LINK,)), FrontendReading()
UNKNOWN = FrontendReading(passed_over=None)
PAGE = (
    b"# TYPE kvrouter_link_slow gauge\n"
    b'kvrouter_link_bandwidth_bytes_per_second{model="m",link="zone"} 10.0\n'
    b'kvrouter_link_latency_seconds{model="m",link="zone"} 0.001\n'
    b'kvrouter_link_slow{model="m",link="zone"} 0.0'
)
OK = b"HTTP/1.1 200 OK\r\nConnection: close\r\n"
ONE = Key("team", "one")
DOOR = MetricsEndpoint("127.0.0.1", 1)

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def answering(answer: bytes | Answer) -> AsyncIterator[tuple[MetricsEndpoint, list[bytes]]]:
    """A port that answers so, and the heads of the requests that came."""
    heads: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            heads.append(await reader.readuntil(b"\r\n\r\n"))
            if isinstance(answer, bytes):
                writer.write(answer)
                await writer.drain()
            else:
                await answer(writer)
        except ConnectionError:
            pass
        finally:
            writer.close()

    async with serving_streams(serve) as server:
        yield MetricsEndpoint("127.0.0.1", port_of(server)), heads


async def test_metrics_page_is_read_for_its_links() -> None:
    async with answering(OK + b"\r\n" + PAGE) as (endpoint, heads):
        assert await read_page(endpoint) == SEEN
    (head,) = heads
    assert head.startswith(b"GET /metrics HTTP/1.1\r\n")
    assert b"gzip" not in head


async def test_links_are_read_from_a_long_page_of_other_lines() -> None:
    async def long(writer: asyncio.StreamWriter) -> None:
        writer.write(OK + b"\r\n")
        for _ in range(40):
            writer.write(b"kvrouter_worker_up 1.0\n" * 5_000)
            await writer.drain()
        writer.write(PAGE + b"\n")
        await writer.drain()

    async with answering(long) as (endpoint, _):
        assert await read_page(endpoint) == SEEN


async def test_open_circuits_of_workers_are_read_and_closed_ones_are_not() -> None:
    telemetry = Telemetry()
    opened: dict[tuple[str, ...], float] = {
        ("1", "closed"): 1.0,
        ("1", "open"): 0.0,
        ("2", "open"): 1.0,
        ("3", "half_open"): 1.0,
    }
    telemetry.worker_circuit.replace(opened)
    async with answering(OK + b"\r\n" + telemetry.render() + PAGE) as (endpoint, _):
        assert await read_page(endpoint) == SEEN._replace(passed_over=frozenset({2, 3}))


async def test_a_worker_that_is_passed_over_is_a_change() -> None:
    fleet = Frontends()
    fleet.shown()
    passing = fleet.pages[DOOR] = FrontendReading(passed_over=frozenset({7}))
    await fleet.reader.read()
    assert (fleet.shown(), fleet.changed) == (passing, [ONE])
    fleet.pages[DOOR] = NOTHING
    await fleet.reader.read()
    assert (fleet.shown(), fleet.changed) == (NOTHING, [ONE, ONE])


async def test_empty_metrics_page_has_no_links() -> None:
    async with answering(OK + b"\r\n") as (endpoint, _):
        assert await read_page(endpoint) == NOTHING


def endless(part: bytes) -> Answer:
    """An answer that ends when nobody reads on, or with far more than is read."""

    async def go_on(writer: asyncio.StreamWriter) -> None:
        writer.write(OK + b"\r\n")
        for _ in range(2 * PAGE_BYTES_MAX // len(part)):
            writer.write(part)
            await writer.drain()

    return go_on


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"no HTTP at all\r\n\r\n",
        b"\x15\x03\x01\x00\x02\x02\x16",
        b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\n\r\n" + PAGE,
        OK + b"Content-Length: 99999\r\n\r\n" + PAGE,
        OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        OK + b"X: " + b"x" * 100_000 + b"\r\n\r\n",
        endless(b"kvrouter_worker_up 1.0\n" * 4096),
        endless(b"x" * 65536),
        endless(b"kvrouter_link_slow{}\n" * 4096),
    ],
    ids=[
        "nothing",
        "no http",
        "tls",
        "503",
        "cut",
        "bad chunk",
        "long head",
        "long page",
        "long line",
        "many links",
    ],
)
async def test_broken_or_oversized_metrics_page_is_not_read(answer: bytes | Answer) -> None:
    async with asyncio.timeout(30.0), answering(answer) as (endpoint, _):
        assert await read_page(endpoint) is None


async def test_redirect_of_a_frontend_is_not_followed() -> None:
    async with answering(OK + b"\r\n" + PAGE) as (other, others_heads):
        redirect = f"HTTP/1.1 307 Temporary Redirect\r\nLocation: {other.url}\r\nContent-Length: 0\r\n\r\n"
        async with answering(redirect.encode()) as (endpoint, heads):
            assert await read_page(endpoint) is None
    assert (len(heads), others_heads) == (1, [])


async def test_page_with_too_many_bytes_of_link_lines_is_not_read() -> None:
    line = b"kvrouter_link_slow{}\n"
    page = OK + b"\r\n" + line * (HELD_BYTES_MAX // len(line) + 10_000)
    assert len(page) < PAGE_BYTES_MAX
    async with answering(page) as (endpoint, _):
        assert await read_page(endpoint) is None


async def test_frontend_that_does_not_end_its_answer_in_time_is_given_up(set_constants: SetConstants) -> None:
    set_constants(frontend_reader, READ_LIMIT_S=0.05)
    left = asyncio.Event()

    async def silent(writer: asyncio.StreamWriter) -> None:
        writer.write(OK + b"\r\n" + PAGE)
        await writer.drain()
        await left.wait()

    async with asyncio.timeout(30.0), answering(silent) as (endpoint, _):
        assert await read_page(endpoint) is None
        left.set()


async def test_closed_port_gives_no_page_and_no_error() -> None:
    async with answering(b"") as (endpoint, _):
        pass
    assert await read_page(endpoint) is None


class Frontends:
    """What is read at each door, and when."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.pages: dict[MetricsEndpoint, FrontendReading | None] = {}
        self.changed: list[Key] = []
        self.reader = FrontendReader(self.changed.append, clock=lambda: self.now_s, read_page=self.read_page)

    async def read_page(self, endpoint: MetricsEndpoint) -> FrontendReading | None:
        return self.pages.get(endpoint)

    def shown(self, key: Key = ONE, endpoint: MetricsEndpoint | None = DOOR) -> FrontendReading:
        return self.reader.follow(key, endpoint, None)


async def test_links_are_shown_as_read_and_only_changes_are_reported() -> None:
    fleet = Frontends()
    assert fleet.shown() == UNKNOWN
    fleet.pages[DOOR] = SEEN
    await fleet.reader.read()
    assert fleet.shown() == SEEN
    await fleet.reader.read()
    fleet.pages[DOOR] = FrontendReading((LINK.model_copy(update={"bandwidth_bytes_per_second": 11}),))
    await fleet.reader.read()
    assert (fleet.shown(), fleet.changed) == (SEEN, [ONE])
    fleet.pages[DOOR] = FrontendReading((OTHER,))
    await fleet.reader.read()
    assert (fleet.shown(), fleet.changed) == (FrontendReading((OTHER,)), [ONE, ONE])


@pytest.mark.parametrize("endpoint", [DOOR, None])
async def test_links_that_cannot_be_read_again_are_kept_for_a_while(endpoint: MetricsEndpoint | None) -> None:
    fleet = Frontends()
    fleet.shown()
    fleet.pages[DOOR] = SEEN
    fleet.now_s = 100.0
    await fleet.reader.read()
    del fleet.pages[DOOR]
    fleet.shown(endpoint=endpoint)
    fleet.now_s += KEPT_S - 1
    await fleet.reader.read()
    assert (fleet.shown(endpoint=endpoint), fleet.changed) == (SEEN, [ONE])
    fleet.now_s += 1
    await fleet.reader.read()
    await fleet.reader.read()
    assert (fleet.shown(endpoint=endpoint), fleet.changed) == (NOTHING, [ONE, ONE])


async def test_empty_page_of_a_frontend_clears_its_shown_links() -> None:
    fleet = Frontends()
    fleet.shown()
    fleet.pages[DOOR] = SEEN
    await fleet.reader.read()
    fleet.pages[DOOR] = NOTHING
    await fleet.reader.read()
    assert (fleet.shown(), fleet.changed) == (NOTHING, [ONE, ONE])


async def test_new_leader_shows_links_of_the_status_until_its_own_first_read() -> None:
    fleet = Frontends()
    before = FrontendReading((LINK,), passed_over=None)
    assert fleet.reader.follow(ONE, DOOR, DeploymentStatus(links=(LINK,))) == before
    assert fleet.reader.follow(ONE, DOOR, DeploymentStatus(links=(OTHER,))) == before
    fleet.pages[DOOR] = SEEN
    await fleet.reader.read()
    assert (fleet.shown(), fleet.changed) == (SEEN, [ONE])


@pytest.mark.parametrize("endpoint", [DOOR, None])
async def test_circuits_are_unknown_until_a_read_or_for_five_minutes(
    endpoint: MetricsEndpoint | None,
) -> None:
    fleet = Frontends()
    fleet.shown(endpoint=endpoint)
    fleet.now_s = KEPT_S - 1
    await fleet.reader.read()
    assert (fleet.shown(endpoint=endpoint), fleet.changed) == (UNKNOWN, [])
    fleet.now_s += 1
    await fleet.reader.read()
    assert (fleet.shown(endpoint=endpoint), fleet.changed) == (NOTHING, [ONE])


async def test_deployment_forgotten_during_a_read_is_not_reported() -> None:
    fleet = Frontends()
    fleet.shown()
    fleet.pages[DOOR] = SEEN
    began, may_end = asyncio.Event(), asyncio.Event()

    async def slow(endpoint: MetricsEndpoint) -> FrontendReading | None:
        began.set()
        await may_end.wait()
        return fleet.pages[endpoint]

    fleet.reader = FrontendReader(fleet.changed.append, clock=lambda: 0.0, read_page=slow)
    fleet.shown()
    reading = asyncio.create_task(fleet.reader.read())
    await began.wait()
    fleet.reader.forget(ONE)
    may_end.set()
    await reading
    assert (fleet.shown(), fleet.changed) == (UNKNOWN, [])


async def test_silent_frontend_blocks_no_other_and_few_pages_are_read_at_once() -> None:
    now, most = 0, 0
    free = asyncio.Event()

    async def read(endpoint: MetricsEndpoint) -> FrontendReading | None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        if endpoint.port == 1:
            await free.wait()
        else:
            await asyncio.sleep(0)
        now -= 1
        return SEEN

    changed = asyncio.Queue[Key]()
    reader = FrontendReader(changed.put_nowait, clock=lambda: 0.0, read_page=read)
    keys = [Key("team", str(number)) for number in range(1, 4 * PAGES_MAX)]
    for key in keys:
        reader.follow(key, MetricsEndpoint("127.0.0.1", int(key.name)), None)
    reading = asyncio.create_task(reader.read())
    async with asyncio.timeout(30.0):
        assert {await changed.get() for _ in keys[1:]} == set(keys[1:])
        free.set()
        await reading
    assert changed.get_nowait() == keys[0]
    assert most == PAGES_MAX

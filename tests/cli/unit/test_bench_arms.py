"""What ``kvrouter bench`` reads of the router's fleet, and where it sends the engines' key."""

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import msgspec
import pytest

from kvrouter.api.client import RouterClient
from kvrouter.api.fleet_schema import Fleet, Model, Rank, RoleName, Worker
from kvrouter.cli.bench.arms import BenchedFleet, arms_of, peers_of, read_fleet
from kvrouter.cli.bench.flags import BenchOptions
from kvrouter.core.errors import ConfigError
from tests.testing.timed_engine import TimedEngine, timed_engine

ROUTER_URL = "http://127.0.0.1:8000"
ENGINE_URLS = ("http://10.0.0.1:1", "http://10.0.0.2:1")


def worker(worker_id: int, *, role: RoleName = "both", ranks: int = 1, url: str | None = None) -> Worker:
    return Worker(
        worker_id=worker_id,
        model="m",
        role=role,
        engine=None,
        engine_url=url,
        domains={},
        ranks=[Rank(dp_rank=at, total_blocks=100) for at in range(ranks)],
    )


def engines() -> list[Worker]:
    return [worker(at, url=url) for at, url in enumerate(ENGINE_URLS)]


@contextmanager
def router_with(fleet: Fleet) -> Iterator[RouterClient]:
    """A router whose page of the fleet is this one."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(msgspec.json.encode(fleet))

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield RouterClient(f"http://127.0.0.1:{server.server_port}")
        finally:
            server.shutdown()


def read(workers: list[Worker], options: BenchOptions, *, running: int = 0) -> BenchedFleet:
    model = Model(model="m", block_size=16, router_mode="kv", cache_view="events")
    with router_with(Fleet(models=[model], workers=workers, running_requests=running)) as client:
        return read_fleet(client, options)


@pytest.mark.parametrize(
    "peers",
    [("x",), ("=http://a:1",), ("round-robin=http://a:1",), ("x=http://a:1",) * 2, (f"x={ROUTER_URL}",)],
)
def test_peers_have_names_of_their_own(peers: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="--peer: "):
        peers_of(BenchOptions(peers=peers), ROUTER_URL)
    assert peers_of(BenchOptions(peers=("x=http://a:1", "y=http://b:2")), ROUTER_URL) == {
        "x": "http://a:1",
        "y": "http://b:2",
    }


@pytest.mark.parametrize(
    ("workers", "caches"),
    [
        ([worker(1, ranks=8)], 8),
        ([worker(1, role="prefill"), worker(2, role="decode")], 1),
        (engines(), 2),
    ],
    ids=["ranks", "pairs", "engines"],
)
def test_every_rank_that_prefills_has_a_cache(workers: list[Worker], caches: int) -> None:
    fleet = read(workers, BenchOptions(model="m"))
    assert (fleet.caches.number, fleet.concurrency) == (caches, caches)


def test_engine_urls_are_one_for_each_engine() -> None:
    assert read(engines(), BenchOptions(model="m", engine_urls=ENGINE_URLS)).engine_urls == ENGINE_URLS
    with pytest.raises(ConfigError, match="--engine-url: 1 given, and the router has 2 engines"):
        read(engines(), BenchOptions(model="m", engine_urls=ENGINE_URLS[:1]))


def test_requests_of_others_ask_for_a_flag() -> None:
    with pytest.raises(ConfigError, match="--yes: is needed, since 3 requests of others run"):
        read(engines(), BenchOptions(model="m"), running=3)
    assert read(engines(), BenchOptions(model="m", yes=True), running=3).running_requests == 3


@pytest.mark.parametrize("is_given", [False, True], ids=["reported", "given"])
async def test_the_key_of_engines_goes_to_the_urls_of_flags_alone(*, is_given: bool) -> None:
    async with timed_engine(TimedEngine()) as router, timed_engine(TimedEngine()) as engine:
        options = BenchOptions(model="m", engine_urls=(engine.url,) if is_given else ())
        fleet = read([worker(1, url=engine.url)], options)
        for arm in arms_of(fleet, options, router.url, {"x": engine.url}, "secret"):
            (server,) = arm.servers
            await server.open()
            await server.look("/v1/models")
            await server.close()
    assert [headers.get("authorization") for headers in router.headers] == [None]
    key = "Bearer secret"
    assert [headers.get("authorization") for headers in engine.headers] == [key if is_given else None, key]

"""Routers that hear badly: events are lost, doubled and late, and the index ends equal to the caches."""

import pytest

from tests.testing.fleet_processes import FILE_TCP_ZMQ, FleetTransports, fleet_processes
from tests.testing.load_generator import LoadGenerator
from tests.testing.nats_server import NatsServer

FLEET = """
version: 1
models: [{name: mock, block_size: 64}]
speedup: 50
workers:
  - {name: worker, replicas: 3, engine: {total_kv_blocks: 128, max_num_batched_tokens: 256}}
"""
"""Small caches, so that blocks are removed as often as they are stored."""

PLANES = [
    FILE_TCP_ZMQ,
    FleetTransports("file-tcp-jetstream", {"DYN_EVENT_PLANE": "jetstream"}),
    FleetTransports("file-tcp-core", {"DYN_EVENT_PLANE": "nats"}, ("--enable-local-indexer",)),
]


@pytest.mark.parametrize("planes", PLANES, ids=str)
async def test_the_index_converges_to_the_caches_despite_lossy_events(
    planes: FleetTransports, shared_nats: NatsServer
) -> None:
    async with fleet_processes(FLEET, planes, shared_nats, module="tests.testing.lossy_frontend") as here:
        load = LoadGenerator(here.frontends)
        await load.ask(600)
        assert (load.answers.whole, load.answers.total) == (600, 600), load.answers.errors
        for frontend in here.frontends:
            metrics = await frontend.metrics()
            assert metrics.total("feed_events_total", outcome="gaps") > 0, "nothing was lost"
            assert metrics.total("feed_events_total", outcome="blocks_removed") > 0
        await here.is_well()

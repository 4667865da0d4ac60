"""Routers that hear badly: events are lost, doubled and late, and the index ends equal to the caches."""

import pytest

from tests.support.file_fleet import file_fleet
from tests.support.load import Load
from tests.support.nats_server import NatsServer
from tests.support.process_transports import FILE_TCP_ZMQ, Planes

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
    Planes("file-tcp-jetstream", {"DYN_EVENT_PLANE": "jetstream"}),
    Planes("file-tcp-core", {"DYN_EVENT_PLANE": "nats"}, ("--enable-local-indexer",)),
]


@pytest.mark.parametrize("planes", PLANES, ids=str)
async def test_the_index_ends_equal_to_the_caches_whatever_is_lost(
    planes: Planes, shared_nats: NatsServer
) -> None:
    async with file_fleet(FLEET, planes, shared_nats, module="tests.support.shaky_frontend") as here:
        load = Load(here.frontends)
        await load.ask(600)
        assert (load.answers.whole, load.answers.total) == (600, 600), load.answers.errors
        for frontend in here.frontends:
            metrics = await frontend.metrics()
            assert metrics.total("feed_events_total", outcome="gaps") > 0, "nothing was lost"
            assert metrics.total("feed_events_total", outcome="blocks_removed") > 0
        await here.is_well()

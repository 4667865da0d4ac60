"""Routers that hear badly: events are lost, doubled and late, and the index ends equal to the caches."""

import pytest

from tests.support.file_fleet import FileFleet
from tests.support.load import Load
from tests.support.nats_server import NatsServer
from tests.support.processes import fleet

FLEET = """
version: 1
models: [{name: mock, block_size: 64}]
speedup: 50
workers:
  - {name: worker, replicas: 3, engine: {total_kv_blocks: 128, max_num_batched_tokens: 256}}
"""
"""Small caches, so that blocks are removed as often as they are stored."""

PLANES = [
    pytest.param({}, (), id="zmq"),
    pytest.param({"DYN_EVENT_PLANE": "jetstream"}, (), id="jetstream"),
    pytest.param({"DYN_EVENT_PLANE": "nats"}, ("--enable-local-indexer",), id="core"),
]


@pytest.mark.parametrize(("environ", "flags"), PLANES)
async def test_the_index_ends_equal_to_the_caches_whatever_is_lost(
    environ: dict[str, str], flags: tuple[str, ...], shared_nats: NatsServer
) -> None:
    async with fleet({"NATS_SERVER": shared_nats.url, **environ}) as processes:
        here = await FileFleet.begin(
            processes, FLEET, flags=flags, frontends=2, module="tests.support.shaky_frontend"
        )
        load = Load(here.frontends)
        await load.ask(600)
        assert (load.answers.whole, load.answers.total) == (600, 600), load.answers.errors
        for frontend in here.frontends:
            metrics = await frontend.metrics()
            assert metrics.total("feed_events_total", outcome="gaps") > 0, "nothing was lost"
            assert metrics.total("feed_events_total", outcome="blocks_removed") > 0
        await here.is_well()

"""Workers that are killed in the middle of an answer: the client gets all of it, and nothing is left over."""

import time
from collections.abc import Callable

import pytest

from tests.support.file_fleet import FileFleet
from tests.support.moments import Moment, meet, slow_fleet
from tests.support.nats_server import NatsServer
from tests.support.processes import fleet

PLANES = [
    pytest.param({}, (), "bootstrap", id="file-tcp-zmq"),
    pytest.param(
        {"DYN_DISCOVERY_BACKEND": "nats", "DYN_REQUEST_PLANE": "http"},
        (),
        "synchronous",
        id="nats-http-jetstream",
    ),
    pytest.param(
        {"DYN_DISCOVERY_BACKEND": "nats", "DYN_REQUEST_PLANE": "nats"},
        ("--enable-local-indexer",),
        "bootstrap",
        id="nats-nats-core",
    ),
]
DEATHS = [
    ("prefill", Moment.PREFILL),
    ("prefill", Moment.EVENT),
    ("prefill", Moment.TRANSFER),
    ("decode", Moment.PREFILL),
    ("decode", Moment.TRANSFER),
    ("decode", Moment.STREAM),
]


@pytest.mark.parametrize(("environ", "flags", "handoff"), PLANES)
async def test_a_worker_killed_at_any_moment_costs_nobody_an_answer(
    environ: dict[str, str],
    flags: tuple[str, ...],
    handoff: str,
    shared_nats: NatsServer,
    record_property: Callable[[str, object], None],
) -> None:
    settings = {"NATS_SERVER": shared_nats.url, "KVROUTER_LEASE_S": "3", **environ}
    async with fleet(settings) as processes:
        slow = await FileFleet.begin(processes, slow_fleet(handoff), flags=flags)
        asked: list[list[int]] = []
        for leg, moment in DEATHS:
            client = await meet(moment, slow.frontends[0])
            victim = (await client.workers())[leg]
            killed_unix_s = time.time()
            await slow.workers[victim].kill()
            await client.end()
            assert client.is_whole, f"{leg} {moment}: {client.error}"
            record_property(
                f"{leg} {moment}: sent elsewhere after s",
                round(client.sent_again_after_s(killed_unix_s), 3),
            )
            await slow.start_worker(victim)
            asked.append(client.prompt)
            await slow.is_well(asked)

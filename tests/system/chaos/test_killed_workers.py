"""Workers that are killed in the middle of an answer: the client gets all of it, and nothing is left over."""

import time
from collections.abc import Callable

import pytest

from tests.testing.fleet_processes import (
    FILE_TCP_ZMQ,
    NATS_HTTP_JETSTREAM,
    NATS_NATS_CORE,
    FleetTransports,
    fleet_processes,
)
from tests.testing.nats_server import NatsServer
from tests.testing.request_phases import RequestPhase, slow_fleet, wait_for_phase

PLANES = [
    (FILE_TCP_ZMQ, "bootstrap"),
    (NATS_HTTP_JETSTREAM, "synchronous"),
    (NATS_NATS_CORE, "bootstrap"),
]
DEATHS = [
    ("prefill", RequestPhase.PREFILL),
    ("prefill", RequestPhase.EVENT),
    ("prefill", RequestPhase.TRANSFER),
    ("decode", RequestPhase.PREFILL),
    ("decode", RequestPhase.TRANSFER),
    ("decode", RequestPhase.STREAM),
]


@pytest.mark.parametrize(("planes", "handoff"), PLANES, ids=str)
async def test_a_worker_killed_in_any_request_phase_loses_no_answer(
    planes: FleetTransports,
    handoff: str,
    shared_nats: NatsServer,
    record_property: Callable[[str, object], None],
) -> None:
    async with fleet_processes(slow_fleet(handoff), planes, shared_nats) as slow:
        asked: list[list[int]] = []
        for leg, moment in DEATHS:
            client = await wait_for_phase(moment, slow.frontends[0])
            victim = (client.last_workers or await client.workers())[leg]
            killed_unix_s = time.time()
            await slow.workers[victim].kill()
            await client.end()
            assert client.is_whole, f"{leg} {moment}: {client.error}"
            record_property(
                f"{leg} {moment}: sent elsewhere after s",
                round(await client.sent_again_after_s(killed_unix_s), 3),
            )
            await slow.start_worker(victim)
            asked.append(client.prompt)
            await slow.is_well(asked)

"""Workers that are killed in the middle of an answer: the client gets all of it, and nothing is left over."""

import time
from collections.abc import Callable

import pytest

from tests.support.file_fleet import file_fleet
from tests.support.moments import Moment, meet, slow_fleet
from tests.support.nats_server import NatsServer
from tests.support.process_transports import FILE_TCP_ZMQ, NATS_HTTP_JETSTREAM, NATS_NATS_CORE, Planes

PLANES = [
    (FILE_TCP_ZMQ, "bootstrap"),
    (NATS_HTTP_JETSTREAM, "synchronous"),
    (NATS_NATS_CORE, "bootstrap"),
]
DEATHS = [
    ("prefill", Moment.PREFILL),
    ("prefill", Moment.EVENT),
    ("prefill", Moment.TRANSFER),
    ("decode", Moment.PREFILL),
    ("decode", Moment.TRANSFER),
    ("decode", Moment.STREAM),
]


@pytest.mark.parametrize(("planes", "handoff"), PLANES, ids=str)
async def test_a_worker_killed_at_any_moment_costs_nobody_an_answer(
    planes: Planes, handoff: str, shared_nats: NatsServer, record_property: Callable[[str, object], None]
) -> None:
    async with file_fleet(slow_fleet(handoff), planes, shared_nats) as slow:
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

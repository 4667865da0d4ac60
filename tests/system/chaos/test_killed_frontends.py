"""Frontends that are killed in the middle of an answer: whoever asks the next one gets all of it."""

import pytest

from tests.testing.fleet_processes import (
    FILE_TCP_ZMQ,
    NATS_NATS_CORE,
    NATS_TCP_JETSTREAM_SYNC,
    FleetTransports,
    fleet_processes,
)
from tests.testing.nats_server import NatsServer
from tests.testing.request_phases import ANSWER_TOKENS, RequestPhase, slow_fleet, wait_for_phase
from tests.testing.streaming_client import StreamingClient

PLANES = [
    (FILE_TCP_ZMQ, "bootstrap"),
    (NATS_TCP_JETSTREAM_SYNC, "synchronous"),
    (NATS_NATS_CORE, "bootstrap"),
]


@pytest.mark.parametrize(("planes", "handoff"), PLANES, ids=str)
async def test_a_frontend_killed_in_any_request_phase_leaves_nothing_behind(
    planes: FleetTransports, handoff: str, shared_nats: NatsServer
) -> None:
    async with fleet_processes(slow_fleet(handoff), planes, shared_nats) as slow:
        asked: list[list[int]] = []
        for number, moment in enumerate(RequestPhase):
            name = f"replica-{number % 2}"
            victim, other = slow.frontends
            client = await wait_for_phase(moment, victim)
            await victim.kill()
            assert (await client.end()).error is not None, "its connection breaks"
            again = StreamingClient(other, prompt=client.prompt, max_tokens=ANSWER_TOKENS)
            assert (await again.end()).is_whole, f"{moment}: {again.error}"
            slow.frontends.remove(victim)
            await slow.start_frontend(name)
            asked.append(again.prompt)
            await slow.is_well(asked)

"""Frontends that are killed in the middle of an answer: whoever asks the next one gets all of it."""

import pytest

from tests.support.clients import Client
from tests.support.file_fleet import file_fleet
from tests.support.moments import ANSWER_TOKENS, Moment, meet, slow_fleet
from tests.support.nats_server import NatsServer
from tests.support.process_transports import FILE_TCP_ZMQ, NATS_NATS_CORE, NATS_TCP_JETSTREAM_SYNC, Planes

PLANES = [
    (FILE_TCP_ZMQ, "bootstrap"),
    (NATS_TCP_JETSTREAM_SYNC, "synchronous"),
    (NATS_NATS_CORE, "bootstrap"),
]


@pytest.mark.parametrize(("planes", "handoff"), PLANES, ids=str)
async def test_a_frontend_killed_at_any_moment_leaves_nothing_behind(
    planes: Planes, handoff: str, shared_nats: NatsServer
) -> None:
    async with file_fleet(slow_fleet(handoff), planes, shared_nats) as slow:
        asked: list[list[int]] = []
        for number, moment in enumerate(Moment):
            name = f"replica-{number % 2}"
            victim, other = slow.frontends
            client = await meet(moment, victim)
            await victim.kill()
            assert (await client.end()).error is not None, "its connection breaks"
            again = Client(other, prompt=client.prompt, max_tokens=ANSWER_TOKENS)
            assert (await again.end()).is_whole, f"{moment}: {again.error}"
            slow.frontends.remove(victim)
            await slow.start_frontend(name)
            asked.append(again.prompt)
            await slow.is_well(asked)

"""Frontends that are killed in the middle of an answer: whoever asks the next one gets all of it."""

import pytest

from tests.support.clients import Client
from tests.support.file_fleet import FileFleet
from tests.support.moments import ANSWER_TOKENS, Moment, meet, slow_fleet
from tests.support.nats_server import NatsServer
from tests.support.processes import fleet

PLANES = [
    pytest.param({}, (), "bootstrap", id="file-tcp-zmq"),
    pytest.param(
        {"DYN_DISCOVERY_BACKEND": "nats", "DYN_ROUTER_REPLICA_SYNC": "true"},
        (),
        "synchronous",
        id="nats-tcp-jetstream-sync",
    ),
    pytest.param(
        {"DYN_DISCOVERY_BACKEND": "nats", "DYN_REQUEST_PLANE": "nats"},
        ("--enable-local-indexer",),
        "bootstrap",
        id="nats-nats-core",
    ),
]


@pytest.mark.parametrize(("environ", "flags", "handoff"), PLANES)
async def test_a_frontend_killed_at_any_moment_leaves_nothing_behind(
    environ: dict[str, str],
    flags: tuple[str, ...],
    handoff: str,
    shared_nats: NatsServer,
) -> None:
    settings = {"NATS_SERVER": shared_nats.url, "KVROUTER_LEASE_S": "3", **environ}
    async with fleet(settings) as processes:
        slow = await FileFleet.begin(processes, slow_fleet(handoff), flags=flags)
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

"""KV that does not reach the only decode worker of its zone: nobody blames it, and clients see nothing."""

import re

import pytest

from tests.testing.fleet_processes import (
    FILE_TCP_ZMQ,
    NATS_HTTP_JETSTREAM,
    NATS_NATS_CORE,
    FleetProcesses,
    FleetTransports,
    fleet_processes,
)
from tests.testing.nats_server import NatsServer
from tests.testing.processes import eventually
from tests.testing.request_phases import RequestPhase, wait_for_phase
from tests.testing.streaming_client import StreamingClient

_FLEET = """
version: 1
models: [{name: mock, block_size: 64}]
topology:
  levels: [zone]
  links: {within: {zone: {latency_s: 2.0, bandwidth_bytes_per_s: 1.0e+12}}}
kv_transfer: {domain: zone, enforcement: required}
workers:
  - {name: prefill, role: prefill, replicas: PREFILLS, domains: {zone: a}, engine: &engine {
      handoff: HANDOFF, kv_wait_expiry_s: 15, timing: {
        prefill_base: 20, prefill_linear: 0.1, decode_base: 4, decode_linear: 0, decode_quadratic: 0}}}
  - {name: decode, role: decode, replicas: 1, domains: {zone: a}, engine: *engine}
"""

NOBODY_LISTENS = "127.0.0.77"
"""An address of this machine that no process of a test listens at: all of them listen at 127.0.0.1."""


def one_decode_worker(*, prefills: int, handoff: str) -> str:
    """A fleet file of one zone; a transfer takes 2 s, longer than a prefill."""
    return _FLEET.replace("PREFILLS", str(prefills)).replace("HANDOFF", handoff)


async def attempts(fleet: FleetProcesses, client: StreamingClient) -> list[dict[str, int]]:
    """The workers of each attempt of an answer that has ended, by leg."""
    reply = await fleet.frontends[0].http.get(f"/v1/decisions/{client.request_id}")
    legs = ("prefill", "decode")
    tries = reply.raise_for_status().json()["attempts"]
    return [{leg: each[leg]["worker_id"] for leg in legs if each.get(leg)} for each in tries]


async def logged_losses(
    fleet: FleetProcesses, client: StreamingClient, *losses: tuple[int, int, str]
) -> None:
    """Return once the frontend's log says this of the request's KV: the prefill worker, the decode worker,
    and why.
    """
    line = rf"kv_lost request_id={client.request_id} .*prefill_worker=(\d+) decode_worker=(\d+) reason=(\w+)"

    async def are_logged() -> bool:
        found = re.findall(line, fleet.frontends[0].lines())
        return [(int(prefill), int(decode), why) for prefill, decode, why in found] == [*losses]

    await eventually(are_logged)


@pytest.mark.parametrize(
    ("planes", "handoff"),
    [(FILE_TCP_ZMQ, "synchronous"), (NATS_HTTP_JETSTREAM, "bootstrap"), (NATS_NATS_CORE, "synchronous")],
    ids=str,
)
async def test_a_prefill_worker_killed_in_mid_transfer_is_replaced(
    planes: FleetTransports, handoff: str, shared_nats: NatsServer
) -> None:
    async with fleet_processes(one_decode_worker(prefills=2, handoff=handoff), planes, shared_nats) as fleet:
        client = await wait_for_phase(RequestPhase.TRANSFER, fleet.frontends[0])
        first = client.last_workers
        await fleet.workers[first["prefill"]].kill()
        await client.end()
        assert client.is_whole, client.error
        (before, after) = await attempts(fleet, client)
        assert (before, after["decode"]) == (first, first["decode"])
        assert after["prefill"] != first["prefill"]
        await logged_losses(fleet, client, (first["prefill"], first["decode"], "broken"))
        await fleet.start_worker(first["prefill"])
        await fleet.is_well([client.prompt])


@pytest.mark.parametrize("handoff", ["bootstrap", "synchronous"])
async def test_unreachable_kv_of_a_live_prefill_worker_costs_no_answer(
    handoff: str, shared_nats: NatsServer
) -> None:
    """Requests reach it over NATS; the address where its KV waits is none of its own."""
    cut_off = {1: {"KVROUTER_ADVERTISE_HOST": NOBODY_LISTENS}}
    async with fleet_processes(
        one_decode_worker(prefills=1, handoff=handoff), NATS_NATS_CORE, shared_nats, environs=cut_off
    ) as fleet:
        client = await StreamingClient(fleet.frontends[0], max_tokens=16).end()
        assert client.is_whole, client.error
        pair = {"prefill": 1, "decode": 2}
        assert await attempts(fleet, client) == [pair, pair, {"decode": 2}]
        await logged_losses(fleet, client, *2 * [(1, 2, "unreachable")])
        await fleet.is_well([client.prompt])

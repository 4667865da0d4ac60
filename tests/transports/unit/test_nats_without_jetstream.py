"""A NATS server whose JetStream is off: what needs it says so, and how to switch it on."""

from collections.abc import Iterator

import nats
import pytest

from kvrouter.core.events import Cleared, KvBatch
from kvrouter.core.ids import DpRank, Epoch, EventId, WorkerId, WorkerRank
from kvrouter.transports.events.jetstream import JetStreamPublisher
from kvrouter.transports.nats_client import NO_JETSTREAM, reason
from kvrouter.transports.records.nats import NatsDiscovery
from tests.testing.discovery_stores import LEASE_S, card, ignore_reports
from tests.testing.event_transports import TransportReports
from tests.testing.nats_server import NatsServer, running_nats
from tests.testing.waits import until


@pytest.fixture(scope="module")
def plain_nats() -> Iterator[NatsServer]:
    with running_nats(has_jetstream=False) as server:
        yield server


async def test_discovery_says_how_to_enable_jetstream(plain_nats: NatsServer) -> None:
    client = await nats.connect(plain_nats.url)
    troubles: list[tuple[str, str]] = []
    stores: list[tuple[bool, str]] = []
    end = NatsDiscovery(
        client,
        namespace="space",
        token="t0p",
        on_trouble=lambda what, why: troubles.append((what, why)),
        on_refused=ignore_reports,
        lease_s=LEASE_S,
    )
    try:
        await end.watch(lambda _card: None, lambda *_: None, lambda *reported: stores.append(reported))
        await end.publish(card())
    finally:
        await end.close()
        await client.close()
    assert stores == [(False, NO_JETSTREAM)]
    assert [why for _, why in troubles] == [f"not announced yet: {NO_JETSTREAM}"]


async def test_event_publisher_says_how_to_enable_jetstream(plain_nats: NatsServer) -> None:
    client = await nats.connect(plain_nats.url)
    notes = TransportReports()
    lane = JetStreamPublisher(client, namespace="space", component="backend", token="t0p", observer=notes)
    try:
        lane.publish(KvBatch(WorkerRank(WorkerId(1), DpRank(0)), Epoch(1), EventId(0), (Cleared(),)))
        await until(lambda: bool(notes.disturbances))
    finally:
        await lane.close()
        await client.close()
    assert notes.disturbances[0] == f"backend: publishing: {NO_JETSTREAM}"


def test_error_without_a_message_is_reported_by_its_class_name() -> None:
    assert reason(ConnectionError()) == "ConnectionError"
    assert reason(ValueError("too long")) == "too long"

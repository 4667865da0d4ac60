"""Which event transport a worker publishes on: the rule of auto, and what a setting says instead."""

import pytest

from kvrouter.app.worker_transports import event_transport_of
from kvrouter.core.workers import EventTransport
from kvrouter.settings.planes import PlaneSettings


@pytest.mark.parametrize(
    ("discovery", "event_plane", "has_local_indexer", "lane"),
    [
        ("file", "auto", False, EventTransport.ZMQ),
        ("file", "auto", True, EventTransport.ZMQ),
        ("nats", "auto", True, EventTransport.NATS),
        ("nats", "auto", False, EventTransport.JETSTREAM),
        ("nats", "zmq", True, EventTransport.ZMQ),
        ("nats", "jetstream", True, EventTransport.JETSTREAM),
        ("file", "nats", False, EventTransport.NATS),
    ],
)
def test_event_lane_follows_discovery_event_plane_and_local_indexer(
    discovery: str, event_plane: str, has_local_indexer: bool, lane: EventTransport
) -> None:
    settings = PlaneSettings.model_validate({"discovery": discovery, "event_plane": event_plane})
    assert event_transport_of(settings, has_local_indexer=has_local_indexer) is lane


@pytest.mark.parametrize(
    ("discovery", "lane"),
    [("file", EventTransport.ZMQ), ("kubernetes", EventTransport.ZMQ), ("nats", EventTransport.JETSTREAM)],
)
def test_worker_without_kv_events_needs_no_nats_for_its_event_lane(
    discovery: str, lane: EventTransport
) -> None:
    settings = PlaneSettings.model_validate({"discovery": discovery, "event_plane": "jetstream"})
    assert event_transport_of(settings, has_local_indexer=False, publishes_kv_events=False) is lane


@pytest.mark.parametrize(
    ("said", "kv_events", "replica_sync", "discovery"),
    [
        ({}, True, False, "nats"),
        ({}, False, False, "file"),
        ({}, False, True, "nats"),
        ({"request_plane": "http"}, False, False, "file"),
        ({"request_plane": "nats"}, False, False, "nats"),
        ({"nats_server": "nats://n:4222"}, False, False, "nats"),
        ({"nats_token": "t"}, False, False, "nats"),
        ({"discovery": "auto"}, False, False, "file"),
        ({"discovery": "kubernetes"}, False, False, "kubernetes"),
        ({"discovery": "nats"}, False, False, "nats"),
        ({"discovery": "file"}, True, True, "file"),
    ],
)
def test_default_discovery_follows_kv_events_replica_sync_and_nats_settings(
    said: dict[str, str], kv_events: bool, replica_sync: bool, discovery: str
) -> None:
    settings = PlaneSettings.model_validate(said)
    found = settings.settled(kv_events=kv_events, replica_sync=replica_sync)
    assert found.discovery == discovery
    assert found.settled(kv_events=True) == found

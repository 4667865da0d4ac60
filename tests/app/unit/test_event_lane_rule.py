"""Which event transport a worker publishes on: the rule of auto, and what a setting says instead."""

import pytest

from kvrouter.app.worker_transports import event_transport_of
from kvrouter.core.workers import EventLane
from kvrouter.settings.planes import PlaneSettings


@pytest.mark.parametrize(
    ("discovery", "event_plane", "has_local_indexer", "lane"),
    [
        ("file", "auto", False, EventLane.ZMQ),
        ("file", "auto", True, EventLane.ZMQ),
        ("nats", "auto", True, EventLane.NATS),
        ("nats", "auto", False, EventLane.JETSTREAM),
        ("nats", "zmq", True, EventLane.ZMQ),
        ("nats", "jetstream", True, EventLane.JETSTREAM),
        ("file", "nats", False, EventLane.NATS),
    ],
)
def test_the_lane_of_a_worker(
    discovery: str, event_plane: str, has_local_indexer: bool, lane: EventLane
) -> None:
    settings = PlaneSettings.model_validate({"discovery": discovery, "event_plane": event_plane})
    assert event_transport_of(settings, has_local_indexer=has_local_indexer) is lane


@pytest.mark.parametrize(
    ("discovery", "lane"),
    [("file", EventLane.ZMQ), ("kubernetes", EventLane.ZMQ), ("nats", EventLane.JETSTREAM)],
)
def test_without_kv_events_no_lane_is_a_reason_for_nats(discovery: str, lane: EventLane) -> None:
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
def test_where_workers_are_announced_unless_it_is_said(
    said: dict[str, str], kv_events: bool, replica_sync: bool, discovery: str
) -> None:
    settings = PlaneSettings.model_validate(said)
    found = settings.settled(kv_events=kv_events, replica_sync=replica_sync)
    assert found.discovery == discovery
    assert found.settled(kv_events=True) == found

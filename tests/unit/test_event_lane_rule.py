"""Which lane a worker publishes on: the rule of auto, and what a setting says instead."""

import pytest

from kvrouter.assembly.worker_wires import lane_of
from kvrouter.config import PlaneSettings
from kvrouter.core.workers import EventLane


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
    assert lane_of(settings, has_local_indexer=has_local_indexer) is lane


@pytest.mark.parametrize(("discovery", "lane"), [("file", EventLane.ZMQ), ("nats", EventLane.JETSTREAM)])
def test_without_kv_events_no_lane_is_a_reason_for_nats(discovery: str, lane: EventLane) -> None:
    settings = PlaneSettings.model_validate({"discovery": discovery, "event_plane": "jetstream"})
    assert lane_of(settings, has_local_indexer=False, publishes_kv_events=False) is lane

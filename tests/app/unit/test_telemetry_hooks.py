"""What adapters tell: everything is counted, and the same thing is logged rarely."""

import logging

import pytest

from kvrouter.app.telemetry_hooks import foreign_on, malformed_on, refusals_on, troubles_on
from kvrouter.core.ids import DpRank, WorkerId, WorkerRank
from kvrouter.telemetry import Telemetry
from kvrouter.transports.events.port import DropReason, foreign
from tests.testing.log_events import event_of


def test_refused_peer_that_keeps_trying_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    telemetry = Telemetry()
    caplog.set_level(logging.INFO, logger="kvrouter")
    on_refused = refusals_on("tcp", telemetry)
    for port in range(40_000, 40_020):
        on_refused(f"10.0.0.1:{port}: the router does not know the token")
    on_refused("10.0.0.2:40000: the router does not know the token")
    assert len(caplog.records) == 2
    assert 'kvrouter_planes_refused_total{plane="tcp"} 21' in telemetry.render().decode()


def test_local_trouble_is_not_counted_as_a_refused_peer(caplog: pytest.LogCaptureFixture) -> None:
    telemetry = Telemetry()
    caplog.set_level(logging.INFO, logger="kvrouter")
    on_trouble = troubles_on("discovery")
    for _ in range(2):
        on_trouble("worker 7", "not announced yet: not connected to NATS")
    (line,) = caplog.records
    assert event_of(line) == "plane_disturbed"
    assert "planes_refused_total{" not in telemetry.render().decode()


def test_dropped_messages_are_counted_by_their_reason(caplog: pytest.LogCaptureFixture) -> None:
    telemetry = Telemetry()
    caplog.set_level(logging.INFO, logger="kvrouter")
    rank = WorkerRank(WorkerId(7), DpRank(0))
    on_foreign = foreign_on("nats", telemetry)
    for reason in (DropReason.OTHER_WORKER, DropReason.OTHER_COMPONENT, DropReason.OTHER_WORKER):
        on_foreign(foreign(rank, "a channel", reason))
    malformed_on("nats", telemetry)("batch: not read")
    page = telemetry.render().decode()
    for counted, n in (("other_worker", 2), ("other_component", 1), ("malformed", 1)):
        assert f'kvrouter_events_dropped_total{{plane="nats",reason="{counted}"}} {n}' in page
    assert 'kvrouter_planes_refused_total{plane="nats"} 1' in page
    assert [event_of(line) for line in caplog.records] == ["events_foreign", "plane_refused"]

"""What adapters tell: everything is counted, and the same thing is logged seldom."""

import logging

import pytest

from kvrouter.assembly.told import refusals_on, troubles_on
from kvrouter.telemetry import Telemetry
from tests.support.logged import event_of


def test_a_peer_that_tries_for_ever_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    telemetry = Telemetry()
    caplog.set_level(logging.INFO, logger="kvrouter")
    on_refused = refusals_on("tcp", telemetry)
    for port in range(40_000, 40_020):
        on_refused(f"10.0.0.1:{port}: the router does not know the token")
    on_refused("10.0.0.2:40000: the router does not know the token")
    assert len(caplog.records) == 2
    assert 'kvrouter_planes_refused_total{plane="tcp"} 21' in telemetry.render().decode()


def test_what_this_process_could_not_do_is_no_refused_peer(caplog: pytest.LogCaptureFixture) -> None:
    telemetry = Telemetry()
    caplog.set_level(logging.INFO, logger="kvrouter")
    on_trouble = troubles_on("discovery")
    for _ in range(2):
        on_trouble("worker 7", "not announced yet: not connected to NATS")
    (line,) = caplog.records
    assert event_of(line) == "plane_disturbed"
    assert "planes_refused_total{" not in telemetry.render().decode()

"""What adapters tell of peers that they refused and frames that make no sense: a metric and a log line."""

import logging
from collections.abc import Callable

from kvrouter.telemetry import Event, Telemetry, log_event

_log = logging.getLogger("kvrouter.planes")


def refusals_on(plane: str, telemetry: Telemetry | None = None) -> Callable[[str], None]:
    """Return the sink of one plane's refusals; without ``telemetry`` they are only logged."""

    def on_refused(why: str) -> None:
        if telemetry is not None:
            telemetry.planes_refused.inc(plane)
        log_event(_log, Event.PLANE_REFUSED, plane=plane, reason=why)

    return on_refused


def troubles_on(plane: str, telemetry: Telemetry | None = None) -> Callable[[str, str], None]:
    """Return the sink for what a person should look at: what it is, and why."""
    on_refused = refusals_on(plane, telemetry)

    def on_trouble(what: str, why: str) -> None:
        on_refused(f"{what}: {why}")

    return on_trouble

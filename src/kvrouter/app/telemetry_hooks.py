"""Telemetry hooks: callbacks of transports for refused peers, malformed frames and broken connections."""

import logging
import re
from collections.abc import Callable

from kvrouter.router.replica_sync import ReplicaSync
from kvrouter.telemetry import Event, Telemetry, log_event
from kvrouter.telemetry.logs import LogThrottle
from kvrouter.transports.events.port import DropReason, ForeignRank, ForeignSink, MalformedSink

_PORT = re.compile(r":\d+(?=: )")

_log = logging.getLogger("kvrouter.planes")  # as log lines name it


def refusals_on(transport: str, telemetry: Telemetry | None = None) -> Callable[[str], None]:
    """Return the callback for one transport's refusals; without ``telemetry`` they are only logged.

    All are counted. A refused peer reconnects for ever, so equal reasons, source ports aside, are throttled
    in the log.
    """
    throttle = LogThrottle()

    def on_refused(why: str) -> None:
        if telemetry is not None:
            telemetry.planes_refused.inc(transport)
        if throttle.allows(_PORT.sub("", why)):
            log_event(_log, Event.PLANE_REFUSED, plane=transport, reason=why)

    return on_refused


def malformed_on(transport: str, telemetry: Telemetry) -> MalformedSink:
    """Return the callback for a router's unreadable messages: logged as refused, and counted as dropped."""
    on_refused = refusals_on(transport, telemetry)

    def on_malformed(why: str) -> None:
        telemetry.events_dropped.inc(transport, DropReason.MALFORMED)
        on_refused(why)

    return on_malformed


def foreign_on(transport: str, telemetry: Telemetry | None = None) -> ForeignSink:
    """Return the callback for messages that name another worker's rank: counted, and throttled in the log."""
    throttle = LogThrottle()

    def on_foreign(error: ForeignRank) -> None:
        if telemetry is not None:
            telemetry.events_dropped.inc(transport, error.reason)
        if throttle.allows(error.message):
            log_event(_log, Event.EVENTS_FOREIGN, plane=transport, reason=error.message)

    return on_foreign


def troubles_on(transport: str) -> Callable[[str, str], None]:
    """Return the callback for failed operations, which are retried for ever: arguments are the operation and
    the reason, and equal ones are throttled in the log.
    """
    throttle = LogThrottle()

    def on_trouble(what: str, why: str) -> None:
        reason = f"{what}: {why}"
        if throttle.allows(reason):
            log_event(_log, Event.PLANE_DISTURBED, plane=transport, reason=reason)

    return on_trouble


def drops_on(transport: str) -> Callable[[int, str], None]:
    """Return the callback for batches that a worker could not publish; routers notice the gap and recover."""

    def on_dropped(n_batches: int, why: str) -> None:
        log_event(_log, Event.EVENTS_DROPPED, plane=transport, batches=n_batches, reason=why)

    return on_dropped


class StreamHooks:
    """Metrics and log events of the JetStream event transport, for both of its ends."""

    def __init__(self, telemetry: Telemetry | None = None) -> None:
        self._refused = (
            refusals_on("jetstream") if telemetry is None else malformed_on("jetstream", telemetry)
        )
        self._foreign = foreign_on("jetstream", telemetry)
        self._dropped = drops_on("jetstream")
        self._log_throttle = LogThrottle()

    def dropped(self, n_batches: int, why: str) -> None:
        """A worker could not publish batches; routers notice the gap and recover."""
        self._dropped(n_batches, why)

    def refused(self, why: str) -> None:
        """A message that is no batch or load was dropped."""
        self._refused(why)

    def spoke_for_another(self, error: ForeignRank) -> None:
        """A message that names a rank of another worker than its subject was dropped."""
        self._foreign(error)

    def disturbed(self, component: str, why: str) -> None:
        """The event transport failed and retries; equal reasons are throttled."""
        if not self._log_throttle.allows(f"{component} {why}"):
            return
        log_event(_log, Event.PLANE_DISTURBED, plane=f"jetstream {component}", reason=why)

    def was_reset(self, component: str) -> None:
        """The stream and the snapshots of the component were cleared, as requested."""
        log_event(_log, Event.STATES_RESET, plane=f"jetstream {component}")


class SyncGauges:
    """Replica sync on the metrics page, read before each scrape."""

    def __init__(self, telemetry: Telemetry, sync: ReplicaSync) -> None:
        self._telemetry = telemetry
        self._sync = sync
        self._counted: dict[str, int] = {}

    def refresh(self) -> None:
        """Set the gauges, and add the counts since the last scrape."""
        counts = self._sync.counts()
        others = counts.others
        self._telemetry.replicas.set(others.replicas)
        self._telemetry.replicas_behind.set(others.behind)
        self._telemetry.replica_leases.set(others.leases)
        for outcome, total in (
            ("gap", others.gaps),
            ("duplicate", others.duplicates),
            ("replica_lost", others.lost),
            ("over_limit", others.over_limit),
            ("unheard", others.unheard),
            ("unusable", others.unusable),
            ("untold", counts.untold),
            ("dropped", counts.dropped),
            ("unsent", counts.unsent),
        ):
            new = total - self._counted.get(outcome, 0)
            if new:
                self._telemetry.replica_sync.inc(outcome, by=new)
                self._counted[outcome] = total

"""Load reports: throttled to the newest of each rank, numbered over NATS; counts of dropped batches."""

import asyncio
import time
from collections.abc import Callable

from kvrouter.core.ids import WorkerRank
from kvrouter.core.workers import LoadReport
from kvrouter.transports.events.encoding import encode_load
from kvrouter.transports.events.port import DropSink
from kvrouter.transports.events.subjects import loads_subject
from kvrouter.transports.message_auth import MessageAuth

LOADS_INTERVAL_S = 0.1
"""The least time between two sends: engines report at every step, and only the newest report matters."""


class LatestLoads:
    """Passes the newest report of each rank to ``send``, at once, then at most once in ``interval_s``."""

    def __init__(self, send: Callable[[LoadReport], None], *, interval_s: float = LOADS_INTERVAL_S) -> None:
        self._send = send
        self._interval_s = interval_s
        self._latest: dict[WorkerRank, LoadReport] = {}
        self._timer: asyncio.TimerHandle | None = None

    def publish(self, report: LoadReport) -> None:
        """Send ``report``, now or soon, unless a newer one of its rank replaces it."""
        self._latest[report.rank] = report
        if self._timer is None:
            self._flush()

    def close(self) -> None:
        """Stop sending."""
        self._latest.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _flush(self) -> None:
        reports, self._latest = self._latest, {}
        for report in reports.values():
            self._send(report)
        self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._due)

    def _due(self) -> None:
        self._timer = None
        if self._latest:
            self._flush()


class LoadEncoder:
    """Encodes load reports of one component for NATS, sealed and numbered. A number is the time of day in ns,
    or the previous number + 1, so that it also grows across restarts of a worker.
    """

    def __init__(self, auth: MessageAuth, *, namespace: str, component: str) -> None:
        self._auth = auth
        self._namespace = namespace
        self._component = component
        self._number = 0

    def seal(self, report: LoadReport) -> tuple[str, bytes]:
        """Return the subject and the message."""
        self._number = max(self._number + 1, time.time_ns())
        subject = loads_subject(self._namespace, self._component, report.rank)
        return subject, self._auth.seal(subject, encode_load(report), number=self._number)


REPORT_EVERY_S = 60.0


class Drops:
    """Counts dropped batches; reports their number and the latest reason at most once in ``every_s``."""

    def __init__(self, on_dropped: DropSink, *, every_s: float = REPORT_EVERY_S) -> None:
        self._report = on_dropped
        self._every_s = every_s
        self._n_unreported = 0
        self._why = ""
        self._timer: asyncio.TimerHandle | None = None

    def add(self, n_batches: int, why: str) -> None:
        """Count ``n_batches`` dropped batches."""
        self._n_unreported += n_batches
        self._why = why
        if self._timer is None:
            self._report_now()

    def close(self) -> None:
        """Report the unreported batches."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._n_unreported:
            self._report(self._n_unreported, self._why)
            self._n_unreported = 0

    def _report_now(self) -> None:
        self._report(self._n_unreported, self._why)
        self._n_unreported = 0
        self._timer = asyncio.get_running_loop().call_later(self._every_s, self._due)

    def _due(self) -> None:
        self._timer = None
        if self._n_unreported:
            self._report_now()

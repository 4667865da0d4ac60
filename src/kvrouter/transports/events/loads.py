"""Load reports: the newest of each rank is sent, numbered over NATS; dropped batches are counted."""

import asyncio
import time
from collections.abc import Callable

from kvrouter.core.ids import WorkerRank
from kvrouter.core.workers import LoadReport
from kvrouter.transports.events.port import DropSink
from kvrouter.transports.events.subjects import loads_subject
from kvrouter.transports.events.wire import encode_load
from kvrouter.transports.message_auth import MessageAuth

LOADS_INTERVAL_S = 0.1
"""The least time between two sendings: engines report at every step, and only the newest report matters."""


class LatestLoads:
    """Hands the newest report of each rank to ``send``, at most once in ``interval_s``; the first at once."""

    def __init__(self, send: Callable[[LoadReport], None], *, interval_s: float = LOADS_INTERVAL_S) -> None:
        self._send = send
        self._interval_s = interval_s
        self._latest: dict[WorkerRank, LoadReport] = {}
        self._timer: asyncio.TimerHandle | None = None

    def publish(self, report: LoadReport) -> None:
        """Send ``report``, now or soon, unless a newer one of its rank comes before."""
        self._latest[report.rank] = report
        if self._timer is None:
            self._flush()

    def close(self) -> None:
        """Send nothing any more."""
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


class SealedLoads:
    """The worker's side of one component. A number is the time of day in ns, or the next one: it also grows
    from one start of a worker to the next, which do not know of each other.
    """

    def __init__(self, seal: MessageAuth, *, namespace: str, component: str) -> None:
        self._seal = seal
        self._namespace = namespace
        self._component = component
        self._number = 0

    def seal(self, report: LoadReport) -> tuple[str, bytes]:
        """Return the subject and the message."""
        self._number = max(self._number + 1, time.time_ns())
        subject = loads_subject(self._namespace, self._component, report.rank)
        return subject, self._seal.seal(subject, encode_load(report), number=self._number)


TELL_EVERY_S = 60.0


class Drops:
    """Counts what was dropped, and reports how many and why the last was. Use it from one loop."""

    def __init__(self, on_dropped: DropSink, *, every_s: float = TELL_EVERY_S) -> None:
        self._report = on_dropped
        self._every_s = every_s
        self._n_unreported = 0
        self._why = ""
        self._timer: asyncio.TimerHandle | None = None

    def add(self, n_batches: int, why: str) -> None:
        """Note that ``n_batches`` were dropped."""
        self._n_unreported += n_batches
        self._why = why
        if self._timer is None:
            self._report_now()

    def close(self) -> None:
        """Report what was not reported yet."""
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

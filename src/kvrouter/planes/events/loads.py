"""Load reports on their way out: the newest of each rank, a few times a second."""

import asyncio
from collections.abc import Callable

from kvrouter.core.ids import WorkerRank
from kvrouter.core.workers import LoadReport

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

"""Load reports over NATS are numbered: a report that was overheard is none when it is said again."""

import time

from kvrouter.core.workers import LoadReport
from kvrouter.planes.events.port import foreign
from kvrouter.planes.events.subjects import is_said_by, loads_subject
from kvrouter.planes.events.wire import decode_load, encode_load
from kvrouter.planes.seal import Newest, Seal


class SealedLoads:
    """The worker's side of one component. A number is the time of day in ns, or the next one: it also grows
    from one start of a worker to the next, which do not know of each other.
    """

    def __init__(self, seal: Seal, *, namespace: str, component: str) -> None:
        self._seal = seal
        self._namespace = namespace
        self._component = component
        self._number = 0

    def seal(self, report: LoadReport) -> tuple[str, bytes]:
        """Return the subject and the message."""
        self._number = max(self._number + 1, time.time_ns())
        subject = loads_subject(self._namespace, self._component, report.rank)
        return subject, self._seal.seal(subject, encode_load(report), number=self._number)


class OpenedLoads:
    """The router's side."""

    def __init__(self, seal: Seal) -> None:
        self._seal = seal
        self._newest = Newest()

    def opened(self, subject: str, message: bytes) -> LoadReport | None:
        """Return what came on ``subject``; None when a newer report came before. Raises ProtocolError, or
        ForeignRank for the load of a rank whose subject is another one.
        """
        number, body = self._seal.numbered(subject, message)
        if not self._newest.takes(subject, number):
            return None
        report = decode_load(body)
        if not is_said_by(subject, report.rank):
            raise foreign(report.rank, subject)
        return report

"""What routers' ends of the event plane share: those who hear it, and the reading of sealed messages."""

from collections.abc import Callable

from kvrouter.core.errors import ProtocolError
from kvrouter.core.events import KvBatch
from kvrouter.core.workers import LoadReport
from kvrouter.transports.events.port import (
    BatchSink,
    ForeignSink,
    LoadSink,
    MalformedSink,
    foreign,
)
from kvrouter.transports.events.subjects import is_said_by
from kvrouter.transports.events.wire import decode_batch, decode_load
from kvrouter.transports.message_auth import MessageAuth, Newest


class EventSinks:
    """Hands what comes to everybody who subscribed, in the order of arrival."""

    def __init__(self) -> None:
        self._sinks: dict[object, tuple[BatchSink, LoadSink]] = {}

    def subscribe(self, on_batch: BatchSink, on_load: LoadSink) -> Callable[[], None]:
        """Begin to deliver; return the function that ends it."""
        key = object()
        self._sinks[key] = (on_batch, on_load)

        def end() -> None:
            self._sinks.pop(key, None)

        return end

    def _hand(self, batch: KvBatch) -> None:
        for on_batch, _ in tuple(self._sinks.values()):
            on_batch(batch)

    def _hand_load(self, report: LoadReport) -> None:
        for _, on_load in tuple(self._sinks.values()):
            on_load(report)


class OpenedMessages:
    """Reads what workers seal for NATS. ``on_malformed`` hears of messages that are not sealed with our token
    or cannot be read, ``on_foreign`` of those that speak for a rank on the subject of another one.
    """

    def __init__(self, seal: MessageAuth, *, on_malformed: MalformedSink, on_foreign: ForeignSink) -> None:
        self._seal = seal
        self._on_malformed = on_malformed
        self._on_foreign = on_foreign
        self._newest = Newest()

    def batch(self, subject: str, message: bytes) -> KvBatch | None:
        """Return the batch that came on ``subject``; None for what was reported."""
        try:
            batch = decode_batch(self._seal.opened(subject, message))
        except ProtocolError as error:
            self._on_malformed(error.message)
            return None
        return batch if self._is_said_by(subject, batch) else None

    def load(self, subject: str, message: bytes) -> LoadReport | None:
        """Return the report that came on ``subject``; None for what was reported, and for an older one."""
        try:
            number, body = self._seal.numbered(subject, message)
            if not self._newest.takes(subject, number):
                return None
            report = decode_load(body)
        except ProtocolError as error:
            self._on_malformed(error.message)
            return None
        return report if self._is_said_by(subject, report) else None

    def _is_said_by(self, subject: str, said: KvBatch | LoadReport) -> bool:
        if not is_said_by(subject, said.rank):
            self._on_foreign(foreign(said.rank, subject))
            return False
        return True

"""Shared parts of routers' ends of event transports: subscribers, and decoding of sealed messages."""

from collections.abc import Callable

from kvrouter.core.errors import ProtocolError
from kvrouter.core.events import KvBatch
from kvrouter.core.workers import LoadReport
from kvrouter.transports.events.encoding import decode_batch, decode_load
from kvrouter.transports.events.port import (
    BatchSink,
    ForeignSink,
    LoadSink,
    MalformedSink,
    foreign,
)
from kvrouter.transports.events.subjects import is_from_rank
from kvrouter.transports.message_auth import MessageAuth, ReplayGuard
from kvrouter.transports.registered import registered


class EventSinks:
    """Passes batches and loads to all subscribers, in the order of arrival."""

    def __init__(self) -> None:
        self._sinks: dict[object, tuple[BatchSink, LoadSink]] = {}

    def subscribe(self, on_batch: BatchSink, on_load: LoadSink) -> Callable[[], None]:
        """Begin to deliver; return the function that ends it."""
        return registered(self._sinks, object(), (on_batch, on_load))

    def _deliver(self, batch: KvBatch) -> None:
        for on_batch, _ in tuple(self._sinks.values()):
            on_batch(batch)

    def _deliver_load(self, report: LoadReport) -> None:
        for _, on_load in tuple(self._sinks.values()):
            on_load(report)


class OpenedMessages:
    """Decodes messages that workers sealed for NATS. ``on_malformed`` is called for a wrong MAC or an
    undecodable message, ``on_foreign`` for a message about a rank of another subject.
    """

    def __init__(self, auth: MessageAuth, *, on_malformed: MalformedSink, on_foreign: ForeignSink) -> None:
        self._auth = auth
        self._on_malformed = on_malformed
        self._on_foreign = on_foreign
        self._replay_guard = ReplayGuard()

    def batch(self, subject: str, message: bytes) -> KvBatch | None:
        """Return the batch that came on ``subject``; None for a reported message."""
        try:
            batch = decode_batch(self._auth.opened(subject, message))
        except ProtocolError as error:
            self._on_malformed(error.message)
            return None
        return batch if self._is_from_rank(subject, batch) else None

    def load(self, subject: str, message: bytes) -> LoadReport | None:
        """Return the report that came on ``subject``; None for a reported message, and for an older one."""
        try:
            number, body = self._auth.numbered(subject, message)
            if not self._replay_guard.takes(subject, number):
                return None
            report = decode_load(body)
        except ProtocolError as error:
            self._on_malformed(error.message)
            return None
        return report if self._is_from_rank(subject, report) else None

    def _is_from_rank(self, subject: str, message: KvBatch | LoadReport) -> bool:
        if not is_from_rank(subject, message.rank):
            self._on_foreign(foreign(message.rank, subject))
            return False
        return True

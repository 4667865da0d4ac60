"""What was logged, by event."""

import logging
from collections.abc import Iterable


def event_of(record: logging.LogRecord) -> str:
    """The event that a line tells; another line's message."""
    event: str = getattr(record, "kvrouter_event", None) or record.getMessage()
    return event


def events_of(records: Iterable[logging.LogRecord]) -> list[str]:
    """The events of these lines, in order."""
    return [event_of(record) for record in records]

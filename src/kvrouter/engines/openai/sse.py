"""Server-sent events as engines write them, cut out of the bytes of an answer as they come."""

from collections.abc import Iterator

from kvrouter.core.errors import ProtocolError

EVENT_MAX_BYTES = 16 * 1024 * 1024
"""The longest event that is read; a chunk with log probabilities of a long answer is far below."""

DONE = b"[DONE]"


class EventCutter:
    """Cuts a stream of bytes into events. An event is ``(raw, data)``: its bytes, and its data lines."""

    def __init__(self) -> None:
        self._rest = b""

    @property
    def is_between(self) -> bool:
        """Whether the last event is complete."""
        return not self._rest.strip()

    def push(self, piece: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield the events that ``piece`` completes; raise ProtocolError for one that is too long."""
        data = self._rest + piece
        begin = 0
        while True:
            end = _end_of_event(data, begin)
            if end < 0:
                break
            raw = data[begin:end]
            yield raw, _data_of(raw)
            begin = end
        self._rest = data[begin:]
        if len(self._rest) > EVENT_MAX_BYTES:
            raise ProtocolError(f"an event is over the {EVENT_MAX_BYTES} bytes allowed", param="data")


def _end_of_event(data: bytes, begin: int) -> int:
    """Where the event that begins at ``begin`` ends, its blank line included; -1 while it is not complete."""
    bare = data.find(b"\n\n", begin)
    # Whichever ends first, so that what comes later never changes where an event ended.
    full = data.find(b"\r\n\r\n", begin, len(data) if bare < 0 else bare + 1)
    if full >= 0:
        return full + 4
    return -1 if bare < 0 else bare + 2


def _data_of(raw: bytes) -> bytes:
    lines = [line[5:].strip() for line in raw.splitlines() if line.startswith(b"data:")]
    return lines[0] if len(lines) == 1 else b"\n".join(lines)

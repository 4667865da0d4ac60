"""Authentication of messages over NATS: a MAC over subject, number and body.

::

    MAC (16) · number (8, big-endian) · body
"""

import hmac
from collections.abc import Hashable

from kvrouter.core.errors import ProtocolError

MAC_BYTES = 16
"""Half of HMAC-SHA-256, the least that RFC 2104 allows: a guess succeeds once in 2^128, and every guess has
to be sent as a message.
"""

NUMBER_BYTES = 8

MESSAGE_AUTH_BYTES = MAC_BYTES + NUMBER_BYTES
"""Bytes that a message has in addition to its body."""

REMEMBERED_MAX = 65_536
"""Senders whose latest number is remembered; the sender that was silent for longest is forgotten first."""


class MessageAuth:
    """Seals messages with a MAC, and opens messages sealed with the same token, purpose and subject.

    ``purpose`` is the transport, its version and its namespace: the key is derived from it, so that a message
    of one transport does not open on another. The MAC is HMAC-SHA-256 over subject, number and body: a
    changed or moved body does not open. A replayed message does: see :class:`ReplayGuard`.
    """

    def __init__(self, token: str, purpose: str) -> None:
        key = hmac.digest(token.encode(), f"kvrouter {purpose}".encode(), "sha256")
        self._keyed = hmac.new(key, digestmod="sha256")  # a copy of it costs a third of a new one

    def seal(self, subject: str, body: bytes | memoryview, *, number: int = 0) -> bytes:
        """Return ``body`` with ``number`` (0 to 2^64 - 1) and a MAC of both and ``subject``."""
        numbered = b"".join((number.to_bytes(NUMBER_BYTES, "big"), body))
        return self._mac(subject, numbered) + numbered

    def opened(self, subject: str, message: bytes | memoryview) -> memoryview:
        """Return the body of a message that came on ``subject``; raise ProtocolError for a wrong MAC."""
        return self.numbered(subject, message)[1]

    def numbered(self, subject: str, message: bytes | memoryview) -> tuple[int, memoryview]:
        """Return the number and the body; raise ProtocolError for a wrong MAC."""
        view = memoryview(message)
        if not hmac.compare_digest(view[:MAC_BYTES], self._mac(subject, view[MAC_BYTES:])):
            raise ProtocolError(
                "not sealed with our token: is KVROUTER_PLANE_TOKEN the same at both ends?", param="token"
            )
        return int.from_bytes(view[MAC_BYTES:MESSAGE_AUTH_BYTES], "big"), view[MESSAGE_AUTH_BYTES:]

    def _mac(self, subject: str, numbered: bytes | memoryview) -> bytes:
        subject_bytes = subject.encode()
        mac = self._keyed.copy()
        mac.update(len(subject_bytes).to_bytes(4, "big") + subject_bytes)
        mac.update(numbered)
        return mac.digest()[:MAC_BYTES]


class ReplayGuard:
    """Accepts the numbered messages of each sender once and in order; rejects repeated and overtaken ones."""

    def __init__(self, *, remembered_max: int = REMEMBERED_MAX) -> None:
        self._remembered_max = remembered_max
        self._numbers: dict[Hashable, int] = {}

    def takes(self, sender: Hashable, number: int) -> bool:
        """Whether ``number`` is above all accepted numbers of ``sender``, and record it; never for 0."""
        if number <= self._numbers.get(sender, 0):
            return False
        self._numbers.pop(sender, None)  # move to the end: the first key is the sender silent for longest
        self._numbers[sender] = number
        if len(self._numbers) > self._remembered_max:
            del self._numbers[next(iter(self._numbers))]
        return True

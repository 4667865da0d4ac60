"""Authentication of messages over NATS: a keyed tag, a recipient and a number.

::

    MAC (16) · number (8, big-endian) · body
"""

import hmac
from collections.abc import Hashable

from kvrouter.core.errors import ProtocolError

MAC_BYTES = 16
"""Half of what HMAC-SHA-256 gives, as little as RFC 2104 allows: a guess fits once in 2^128, and every guess
is a message that has to be sent here."""

NUMBER_BYTES = 8

MESSAGE_AUTH_BYTES = MAC_BYTES + NUMBER_BYTES
"""What a message is longer than its body."""

REMEMBERED_MAX = 65_536
"""Senders whose numbers are remembered; the one that was not heard for longest is forgotten first."""


class MessageAuth:
    """Seals messages, and opens those that were sealed with the same token for the same purpose and subject.

    ``purpose`` is the plane, its version and its namespace: it makes the key, so that nothing of one plane
    opens on another. The MAC is HMAC-SHA-256 over subject, number and body: a body that was changed, or moved
    to another subject, does not open. A whole message that is sent again does: see :class:`Newest`.
    """

    def __init__(self, token: str, purpose: str) -> None:
        key = hmac.digest(token.encode(), f"kvrouter {purpose}".encode(), "sha256")
        self._keyed = hmac.new(key, digestmod="sha256")  # a copy of it costs a third of a new one

    def seal(self, subject: str, body: bytes | memoryview, *, number: int = 0) -> bytes:
        """Return the message that says ``body`` on ``subject``. ``number``: 0 to 2^64 - 1."""
        numbered = b"".join((number.to_bytes(NUMBER_BYTES, "big"), body))
        return self._mac(subject, numbered) + numbered

    def opened(self, subject: str, message: bytes | memoryview) -> memoryview:
        """Return the body of a message that came on ``subject``; raise ProtocolError for a stranger's."""
        return self.numbered(subject, message)[1]

    def numbered(self, subject: str, message: bytes | memoryview) -> tuple[int, memoryview]:
        """Return the number and the body; raise ProtocolError for a stranger's message."""
        view = memoryview(message)
        if not hmac.compare_digest(view[:MAC_BYTES], self._mac(subject, view[MAC_BYTES:])):
            raise ProtocolError(
                "not sealed with our token: is KVROUTER_PLANE_TOKEN the same at both ends?", param="token"
            )
        return int.from_bytes(view[MAC_BYTES:MESSAGE_AUTH_BYTES], "big"), view[MESSAGE_AUTH_BYTES:]

    def _mac(self, subject: str, numbered: bytes | memoryview) -> bytes:
        place = subject.encode()
        mac = self._keyed.copy()
        mac.update(len(place).to_bytes(4, "big") + place)
        mac.update(numbered)
        return mac.digest()[:MAC_BYTES]


class Newest:
    """Takes the numbered messages of each sender once and in order; what is repeated or overtaken is old."""

    def __init__(self, *, remembered_max: int = REMEMBERED_MAX) -> None:
        self._remembered_max = remembered_max
        self._numbers: dict[Hashable, int] = {}

    def takes(self, sender: Hashable, number: int) -> bool:
        """Whether ``number`` is above all that were taken from ``sender``; 0 never is."""
        if number <= self._numbers.get(sender, 0):
            return False
        self._numbers.pop(sender, None)  # to its end: the first is the one not heard for longest
        self._numbers[sender] = number
        if len(self._numbers) > self._remembered_max:
            del self._numbers[next(iter(self._numbers))]
        return True

"""The handshake of a session over a byte stream: greeting, hello, proof. See ``docs/wire.md``.

The worker's end begins (a greeting with a nonce), the router's end answers (a hello with another nonce, the
worker it wants, and a proof of the shared token), and the worker's end replies with its own proof. The token
itself is never sent, and a recorded handshake proves nothing on another connection. Its form is fixed: input
of unauthenticated peers is not parsed. A pipe that authenticates every message needs no handshake.
"""

import hmac
from dataclasses import dataclass
from struct import Struct

from kvrouter.core.errors import ProtocolError
from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.transports.requests.encoding import VERSION

MAGIC = b"kvrouter"
NONCE_BYTES = 16

_OPENING = Struct("<8sH")
_GREETING = Struct("<8sH16s")
_HELLO = Struct("<8sH16sQQ32s")
_NAMES = Struct("<QQ")

GREETING_BYTES = _GREETING.size
HELLO_BYTES = _HELLO.size


@dataclass(frozen=True, slots=True)
class Hello:
    """The router's hello: the worker that it wants, and the proof that it has the token."""

    nonce: bytes
    worker_id: WorkerId
    incarnation: Epoch
    proof: bytes


class Secret:
    """The shared token. Without one, any peer that speaks the protocol is accepted."""

    def __init__(self, token: str | None) -> None:
        self._key = b"" if token is None else token.encode()

    def router_proof(self, worker_nonce: bytes, nonce: bytes, worker_id: int, incarnation: int) -> bytes:
        """Return the HMAC that proves to the worker that this router has the token."""
        signed = b"router" + worker_nonce + nonce + _NAMES.pack(worker_id, incarnation)
        return hmac.digest(self._key, signed, "sha256")

    def worker_proof(self, worker_nonce: bytes, nonce: bytes, worker_id: int, incarnation: int) -> bytes:
        """Return the proof that only a worker with the token can give on this connection."""
        signed = b"worker" + worker_nonce + nonce + _NAMES.pack(worker_id, incarnation)
        return hmac.digest(self._key, signed, "sha256")


def greeting(worker_nonce: bytes) -> bytes:
    """Return the first bytes of a worker's end."""
    return _GREETING.pack(MAGIC, VERSION, worker_nonce)


def read_greeting(data: bytes | bytearray) -> bytes | None:
    """Return the nonce of the worker's end, None while the greeting is incomplete; raise ProtocolError."""
    _check_opening(data)
    if len(data) < GREETING_BYTES:
        return None
    nonce: bytes = _GREETING.unpack_from(data)[2]
    return nonce


def hello(secret: Secret, worker_nonce: bytes, nonce: bytes, worker_id: int, incarnation: int) -> bytes:
    """Return the first bytes of a router's end."""
    proof = secret.router_proof(worker_nonce, nonce, worker_id, incarnation)
    return _HELLO.pack(MAGIC, VERSION, nonce, worker_id, incarnation, proof)


def read_hello(data: bytes | bytearray) -> Hello | None:
    """Return the router's hello, None while it is incomplete; raise ProtocolError."""
    _check_opening(data)
    if len(data) < HELLO_BYTES:
        return None
    _, _, nonce, worker_id, incarnation, proof = _HELLO.unpack_from(data)
    return Hello(nonce, WorkerId(worker_id), Epoch(incarnation), proof)


def _check_opening(data: bytes | bytearray) -> None:
    """Reject another protocol at its first byte, another version as soon as it is read."""
    if data[: len(MAGIC)] != MAGIC[: len(data)]:
        raise ProtocolError("the peer does not speak kvrouter's protocol", param="magic")
    if len(data) >= _OPENING.size:
        version = _OPENING.unpack_from(data)[1]
        if version != VERSION:
            raise ProtocolError(f"the peer speaks version {version}, not {VERSION}", param="version")

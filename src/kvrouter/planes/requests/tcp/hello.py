"""How the two ends of a tcp connection prove who they are before either reads a frame of the other.

The worker's end speaks first (a greeting with a nonce), the router's end answers (a hello with a nonce of its
own, the worker it wants, and a proof of the shared token), and the worker's end welcomes it with a proof of
its own. The token itself never travels, and what was overheard proves nothing on another connection. All of
it has a fixed form: nothing of a stranger is parsed.
"""

import hmac
import secrets
from dataclasses import dataclass
from struct import Struct

from kvrouter.core.errors import ProtocolError
from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.planes.requests.wire import VERSION

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
    """What a router's end says: whom it wants, and the proof that it may."""

    nonce: bytes
    worker_id: WorkerId
    incarnation: Epoch
    proof: bytes


class Secret:
    """The shared token. Without one, whoever speaks the protocol is welcome."""

    def __init__(self, token: str | None) -> None:
        self._key = b"" if token is None else token.encode()

    def router_proof(self, worker_nonce: bytes, nonce: bytes, worker_id: int, incarnation: int) -> bytes:
        """Return what only a router with the token can say on this connection."""
        said = b"router" + worker_nonce + nonce + _NAMES.pack(worker_id, incarnation)
        return hmac.digest(self._key, said, "sha256")

    def worker_proof(self, worker_nonce: bytes, nonce: bytes, worker_id: int, incarnation: int) -> bytes:
        """Return what only a worker with the token can say on this connection."""
        said = b"worker" + worker_nonce + nonce + _NAMES.pack(worker_id, incarnation)
        return hmac.digest(self._key, said, "sha256")


def new_nonce() -> bytes:
    """Return a number used once."""
    return secrets.token_bytes(NONCE_BYTES)


def greeting(worker_nonce: bytes) -> bytes:
    """Return the first bytes of a worker's end."""
    return _GREETING.pack(MAGIC, VERSION, worker_nonce)


def read_greeting(data: bytes | bytearray) -> bytes | None:
    """Return the nonce of the worker's end, None while bytes are missing; raise ProtocolError."""
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
    """Return what the router's end says, None while bytes are missing; raise ProtocolError."""
    _check_opening(data)
    if len(data) < HELLO_BYTES:
        return None
    _, _, nonce, worker_id, incarnation, proof = _HELLO.unpack_from(data)
    return Hello(nonce, WorkerId(worker_id), Epoch(incarnation), proof)


def _check_opening(data: bytes | bytearray) -> None:
    """Refuse another protocol by its first byte, another version as soon as it is told."""
    if data[: len(MAGIC)] != MAGIC[: len(data)]:
        raise ProtocolError("the peer does not speak kvrouter's protocol", param="magic")
    if len(data) >= _OPENING.size:
        version = _OPENING.unpack_from(data)[1]
        if version != VERSION:
            raise ProtocolError(f"the peer speaks version {version}, not {VERSION}", param="version")

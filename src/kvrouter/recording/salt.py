"""Salted names: without the salt nobody can find out what a name stands for, not even by trying."""

import secrets
from hashlib import blake2b
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from kvrouter.core.errors import ConfigError

SALT_BYTES = 32
SALT_FILE_MAX_BYTES = 4096

_NAME_BYTES = 8

U64 = npt.NDArray[np.uint64]


class Salt:
    """The key of a recording's names. ``id`` names it, and says nothing of it."""

    def __init__(self, secret: bytes) -> None:
        self._sessions = _derived(secret, b"sessions", 32)
        self._taints = _derived(secret, b"taints", 32)
        self._block_key = _derived(secret, b"blocks", 16)
        self.id = _derived(secret, b"id", 8).hex()

    @classmethod
    def drawn(cls) -> Self:
        """Return a salt that is nowhere but in this process."""
        return cls(secrets.token_bytes(SALT_BYTES))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return the salt in a file, shared with other recordings: at least 32 bytes.

        Raises ConfigError.
        """
        try:
            with path.open("rb") as file:
                secret = file.read(SALT_FILE_MAX_BYTES + 1)
        except OSError as error:
            raise ConfigError(
                f"recording.salt: {path}: cannot be read: {error.strerror or error}",
                param="salt",
            ) from error
        if not SALT_BYTES <= len(secret) <= SALT_FILE_MAX_BYTES:
            raise ConfigError(
                f"recording.salt: {path}: must hold {SALT_BYTES} to {SALT_FILE_MAX_BYTES} random "
                "bytes, as `head -c 32 /dev/urandom` writes them",
                param="salt",
            )
        return cls(secret)

    def session(self, client_id: str) -> str:
        """Return the name of a client's id of a session: 16 hexadecimal digits."""
        return _named(client_id, self._sessions)

    def taint(self, taint: str) -> str:
        """Return the name of a taint that a client wrote."""
        return f"salted:{_named(taint, self._taints)}"

    def blocks(self, hashes: bytes) -> bytes:
        """Return the names of blocks, by their sequence hashes: unsigned 64 bits each, little-endian."""
        return siphash(np.frombuffer(hashes, dtype="<u8"), self._block_key).astype("<u8").tobytes()


def _derived(secret: bytes, purpose: bytes, n_bytes: int) -> bytes:
    """Return a key of its own for each purpose."""
    return blake2b(secret, digest_size=n_bytes, person=b"kvr-" + purpose).digest()


def _named(text: str, key: bytes) -> str:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=_NAME_BYTES, key=key).hexdigest()


_LANES = (0x736F6D6570736575, 0x646F72616E646F6D, 0x6C7967656E657261, 0x7465646279746573)
_LENGTH = np.uint64(8 << 56)
_END = np.uint64(0xFF)
_SHIFTS = {bits: (np.uint64(bits), np.uint64(64 - bits)) for bits in (13, 16, 17, 21, 32)}


def siphash(numbers: npt.NDArray[np.uint64], key: bytes) -> U64:
    """Return SipHash-2-4 of each number, as 8 bytes little-endian, under a key of 16 bytes.

    All at once: numpy's cost for a call is that of some hundred numbers.
    """
    keys = (int.from_bytes(key[:8], "little"), int.from_bytes(key[8:], "little"))
    lanes = [np.full(len(numbers), lane ^ keys[at % 2], dtype=np.uint64) for at, lane in enumerate(_LANES)]
    spare = np.empty(len(numbers), dtype=np.uint64)
    v0, _, v2, v3 = lanes
    for word in (numbers, _LENGTH):
        np.bitwise_xor(v3, word, out=v3)
        _rounds(lanes, spare, 2)
        np.bitwise_xor(v0, word, out=v0)
    np.bitwise_xor(v2, _END, out=v2)
    _rounds(lanes, spare, 4)
    return lanes[0] ^ lanes[1] ^ lanes[2] ^ lanes[3]


def _rounds(lanes: list[U64], spare: U64, times: int) -> None:
    v0, v1, v2, v3 = lanes
    for _ in range(times):
        _mix(v0, v1, 13, spare)
        _rotate(v0, 32, spare)
        _mix(v2, v3, 16, spare)
        _mix(v0, v3, 21, spare)
        _mix(v2, v1, 17, spare)
        _rotate(v2, 32, spare)


def _mix(into: U64, other: U64, bits: int, spare: U64) -> None:
    np.add(into, other, out=into)
    _rotate(other, bits, spare)
    np.bitwise_xor(other, into, out=other)


def _rotate(lane: U64, bits: int, spare: U64) -> None:
    left, right = _SHIFTS[bits]
    np.right_shift(lane, right, out=spare)
    np.left_shift(lane, left, out=lane)
    np.bitwise_or(lane, spare, out=lane)

"""Salted names: without the salt a name cannot be reversed, not even by trying values."""

import secrets
from hashlib import blake2b
from pathlib import Path
from typing import Self

from kvrouter.core.errors import ConfigError
from kvrouter.core.secret import secret_bytes

SALT_BYTES = 32
SALT_FILE_MAX_BYTES = 4096

_NAME_BYTES = 8


class Salt:
    """The key of a recording's names. ``id`` identifies it without revealing it. ``block_key`` are the 16
    bytes that key the names of blocks.
    """

    def __init__(self, secret: bytes) -> None:
        self._sessions = _derived(secret, b"sessions", 32)
        self._taints = _derived(secret, b"taints", 32)
        self.block_key = _derived(secret, b"blocks", 16)
        self.id = _derived(secret, b"id", 8).hex()

    @classmethod
    def drawn(cls) -> Self:
        """Return a random salt that exists only in this process."""
        return cls(secrets.token_bytes(SALT_BYTES))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return the salt in a file, shared with other recordings: at least 32 bytes.

        Raises ConfigError.
        """
        secret = secret_bytes(path, "recording.salt", max_bytes=SALT_FILE_MAX_BYTES)
        if len(secret) < SALT_BYTES:
            raise ConfigError(
                f"recording.salt: {path}: must hold {SALT_BYTES} to {SALT_FILE_MAX_BYTES} random "
                "bytes, as `head -c 32 /dev/urandom` writes them",
                param="salt",
            )
        return cls(secret)

    def session(self, client_id: str) -> str:
        """Return the salted name of a client's id of a session: 16 hexadecimal digits."""
        return _named(client_id, self._sessions)

    def taint(self, taint: str) -> str:
        """Return the salted name of a taint that a client wrote."""
        return f"salted:{_named(taint, self._taints)}"


def _derived(secret: bytes, purpose: bytes, n_bytes: int) -> bytes:
    """Return a key derived for one purpose."""
    return blake2b(secret, digest_size=n_bytes, person=b"kvr-" + purpose).digest()


def _named(text: str, key: bytes) -> str:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=_NAME_BYTES, key=key).hexdigest()

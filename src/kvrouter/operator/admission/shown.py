"""The certificate that the door shows: read again when its files change, without losing a connection."""

import ssl
from pathlib import Path

from kvrouter.core.errors import ConfigError

Stamp = tuple[tuple[int, int, int], ...]


class ShownCertificate:
    """A TLS context whose certificate can be exchanged between two handshakes.

    Raises ConfigError, naming the file, when the first certificate cannot be read.
    """

    def __init__(self, cert: Path, key: Path) -> None:
        self._cert, self._key = cert, key
        self._stamp = self._look()
        self._latest = self._read()
        self.context = self._read()
        self.context.sni_callback = self._show_latest

    def reread(self) -> bool:
        """Read the files again if they changed; return whether they did.

        Raises ConfigError for files that cannot be read, or do not fit each other: what was shown is shown
        still, and they are read again when they change once more.
        """
        stamp = self._look()
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        self._latest = self._read()
        return True

    def _show_latest(self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = self._latest

    def _look(self) -> Stamp:
        """What tells one version of both files from another, as a Secret's volume exchanges them."""
        try:
            found = [path.stat() for path in (self._cert, self._key)]
        except OSError:
            return ()
        return tuple((stat.st_ino, stat.st_mtime_ns, stat.st_size) for stat in found)

    def _read(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self._cert, self._key)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"{self._cert}, {self._key}: {error}", param="certificate") from error
        return context

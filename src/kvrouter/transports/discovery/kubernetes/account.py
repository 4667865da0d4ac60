"""The service account of a pod: token, authority and namespace."""

import ssl
import time
from dataclasses import dataclass
from pathlib import Path

from kvrouter.core.errors import ConfigError

TOKEN_GOOD_S = 60.0
"""For how long a token that was read is used: the kubelet writes a new one long before it runs out."""

TOKEN, AUTHORITY, NAMESPACE = "token", "ca.crt", "namespace"
"""The files of a service account."""


@dataclass(frozen=True, slots=True)
class Account:
    """Where the API server is, and as whom it is asked; ``namespace`` is the pod's, in Kubernetes."""

    url: str
    folder: Path
    namespace: str

    def trust(self) -> ssl.SSLContext:
        """Whom this account believes to be the API server. Raises OSError for files that cannot be read."""
        return ssl.create_default_context(cafile=self.folder / AUTHORITY)


class Token:
    """The token of an account, read again now and then."""

    def __init__(self, account: Account) -> None:
        self._path = account.folder / TOKEN
        self._text = ""
        self._good_until = 0.0

    def read(self) -> str:
        """Return the token. Raises OSError when the file cannot be read."""
        now = time.monotonic()
        if now >= self._good_until:
            self._text = self._path.read_text("ascii").strip()
            self._good_until = now + TOKEN_GOOD_S
        return self._text

    def refused(self) -> None:
        """The API server does not take it: the next one is read at once."""
        self._good_until = 0.0


def account_of_pod(
    folder: Path,
    *,
    host: str | None,
    port: int,
    wanted_by: str = "--discovery kubernetes",
    elsewhere: str = "choose file or nats",
) -> Account:
    """Return the account in ``folder``, at the API server that listens on ``host:port``.

    ``wanted_by`` is the flag that needs it, ``elsewhere`` what to do where this is no pod. Raises ConfigError
    there, and in a pod without a service account.
    """
    if not host:
        raise ConfigError(
            f"{wanted_by}: KUBERNETES_SERVICE_HOST is not set, so this is no pod: {elsewhere}",
            param="kubernetes_host",
        )
    try:
        namespace = (folder / NAMESPACE).read_text("utf-8").strip()
        (folder / TOKEN).read_bytes()
        (folder / AUTHORITY).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{wanted_by}: {error.filename}: {error.strerror}: give the pod a service account, "
            "and leave automountServiceAccountToken on",
            param="kubernetes_account",
        ) from error
    named = f"[{host}]" if ":" in host else host
    return Account(f"https://{named}:{port}", folder, namespace)

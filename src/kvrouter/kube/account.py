"""A pod's service account, and authenticated connections to the API server."""

import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from kvrouter.core.errors import ConfigError
from kvrouter.core.http_client import HttpClient
from kvrouter.core.secret import secret_file
from kvrouter.kube.client import ClusterLost, Query

TOKEN_GOOD_S = 60.0
"""For how long a token that was read is used: the kubelet writes a new one long before it runs out."""

KEPT_OPEN_S = 75.0
"""For how long a connection waits for the next question. The API server closes one after 90 s; a worker
renews its lease more often than this, so that no renewal costs both of them a handshake.
"""

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

    def connection(self) -> "AccountConnection":
        """Return a connection as this account."""
        return AccountConnection(self)


class Token:
    """The token of an account, read again once in a while."""

    def __init__(self, account: Account) -> None:
        self._path = account.folder / TOKEN
        self._text = ""
        self._good_until = 0.0

    def read(self) -> str:
        """Return the token. Raises ConfigError when the file cannot be read."""
        now = time.monotonic()
        if now >= self._good_until:
            self._text = secret_file(self._path, "the service account's token")
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


class AccountConnection:
    """A :class:`~kvrouter.kube.client.Connection` as a service account."""

    def __init__(self, account: Account) -> None:
        self._account = account
        self._token = Token(account)
        self._session: HttpClient | None = None

    async def send(
        self,
        method: str,
        path: str,
        *,
        query: Query,
        headers: Mapping[str, str],
        body: bytes | None,
        limits: aiohttp.ClientTimeout,
    ) -> aiohttp.ClientResponse:
        """Send a request. Raises ClusterLost where the account's files cannot be read."""
        try:
            token = self._token.read()
            trust = None if self._session is not None else self._account.trust()
        except ConfigError as error:
            raise ClusterLost(error.message) from error
        except OSError as error:
            authority = self._account.folder / AUTHORITY
            why = error.strerror or "holds no certificate"
            raise ClusterLost(f"the service account's authority: {authority}: {why}") from error
        if self._session is None:
            connector = aiohttp.TCPConnector(
                ssl=trust if trust is not None else True, limit=0, keepalive_timeout=KEPT_OPEN_S
            )
            self._session = HttpClient(connector=connector)
        return await self._session.request(
            method,
            f"{self._account.url}{path}",
            params=query,
            data=body,
            headers={**headers, "Authorization": f"Bearer {token}"},
            limits=limits,
        )

    def refused(self) -> None:
        """The token that was read is not taken any more."""
        self._token.refused()

    async def close(self) -> None:
        """Close every connection; idempotent."""
        if self._session is not None:
            await self._session.close()

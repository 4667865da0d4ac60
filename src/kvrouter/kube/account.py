"""A pod's service account, and authenticated connections to the API server."""

import ssl
import time
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from kvrouter.core.errors import ConfigError
from kvrouter.core.http_client import HttpClient
from kvrouter.core.secret import secret_file
from kvrouter.kube.client import ApiRequest, ClusterLost

TOKEN_GOOD_S = 60.0
"""How long a token is used after it was read: the kubelet writes a new one long before it expires."""

KEPT_OPEN_S = 75.0
"""How long an idle connection is kept. The API server closes one after 90 s; a worker renews its lease more
often than this, so that no renewal costs a TLS handshake.
"""

TOKEN, AUTHORITY, NAMESPACE = "token", "ca.crt", "namespace"
"""The files of a service account."""


@dataclass(frozen=True, slots=True)
class Account:
    """The URL of the API server and a service account; ``namespace`` is the pod's, in Kubernetes."""

    url: str
    folder: Path
    namespace: str

    def ssl_context(self) -> ssl.SSLContext:
        """Return a TLS context that trusts the account's authority. Raises OSError for unreadable files."""
        return ssl.create_default_context(cafile=self.folder / AUTHORITY)

    def connection(self) -> "AccountConnection":
        """Return a connection as this account."""
        return AccountConnection(self)


class Token:
    """The token of an account, read again periodically."""

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
        """Read the token again at the next use: the API server rejected it."""
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

    ``wanted_by`` is the flag that needs it, ``elsewhere`` the advice outside a pod. Raises ConfigError there,
    and in a pod without a service account.
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
    """A :class:`~kvrouter.kube.client.Connection` with a service account."""

    def __init__(self, account: Account) -> None:
        self._account = account
        self._token = Token(account)
        self._session: HttpClient | None = None

    async def send(self, request: ApiRequest) -> aiohttp.ClientResponse:
        """Send a request. Raises ClusterLost where the account's files cannot be read."""
        try:
            token = self._token.read()
            ssl_context = None if self._session is not None else self._account.ssl_context()
        except ConfigError as error:
            raise ClusterLost(error.message) from error
        except OSError as error:
            authority = self._account.folder / AUTHORITY
            why = error.strerror or "holds no certificate"
            raise ClusterLost(f"the service account's authority: {authority}: {why}") from error
        if self._session is None:
            connector = aiohttp.TCPConnector(
                ssl=ssl_context if ssl_context is not None else True, limit=0, keepalive_timeout=KEPT_OPEN_S
            )
            self._session = HttpClient(connector=connector)
        return await self._session.request(
            request.method,
            f"{self._account.url}{request.path}",
            params=request.query,
            data=request.body,
            headers={**request.headers, "Authorization": f"Bearer {token}"},
            limits=request.limits,
        )

    def refused(self) -> None:
        """Discard the token: the API server rejected it."""
        self._token.refused()

    async def close(self) -> None:
        """Close every connection; idempotent."""
        if self._session is not None:
            await self._session.close()

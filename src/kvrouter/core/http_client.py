"""The HTTP client for requests to other programs, and plain-language reasons for failed connections."""

import errno
import http.client
import os
import socket
import ssl
from collections.abc import Mapping, Sequence
from io import BytesIO

import aiohttp
from yarl import URL

from kvrouter.core.hosts import is_resolvable

DEFAULT_LIMITS = aiohttp.ClientTimeout(total=None)
"""No timeout: callers set their own, per client or per request."""

HEADER_MAX_BYTES = 64 * 1024
HEADERS_MAX = 256
"""The longest header of an answer, and the most headers; an answer beyond either is an error."""

Body = bytes | BytesIO


class HttpClient:
    """Sends HTTP requests to other programs. It follows no redirect, keeps no cookie, and uses no proxy or
    password of the environment. The caller closes the answer.

    Raises aiohttp's errors; :func:`connection_failure` explains them.
    """

    def __init__(
        self,
        *,
        connector: aiohttp.TCPConnector | None = None,
        headers: Mapping[str, str] | None = None,
        limits: aiohttp.ClientTimeout = DEFAULT_LIMITS,
        read_bufsize: int = 2**16,
        auto_decompress: bool = True,
    ) -> None:
        self._session = aiohttp.ClientSession(  # noqa: TID251 - the only session factory
            max_line_size=HEADER_MAX_BYTES,
            max_field_size=HEADER_MAX_BYTES,
            max_headers=HEADERS_MAX,
            connector=connector,
            headers=headers,
            timeout=limits,
            read_bufsize=read_bufsize,
            auto_decompress=auto_decompress,
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
        )

    async def __aenter__(self) -> "HttpClient":
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.close()

    async def request(
        self,
        method: str,
        url: str,
        *,
        params: Sequence[tuple[str, str]] = (),
        headers: Mapping[str, str] | None = None,
        data: Body | None = None,
        limits: aiohttp.ClientTimeout | None = None,
    ) -> aiohttp.ClientResponse:
        """Send a request; return its answer once its head has arrived."""
        try:
            return await self._session.request(
                method,
                url,
                params=list(params) or None,
                headers=headers,
                data=data,
                timeout=limits or self._session.timeout,
                allow_redirects=False,
            )
        except UnicodeError as error:  # aiohttp passes the resolver's on
            if is_resolvable(URL(url).raw_host or ""):
                raise
            raise aiohttp.InvalidURL(url) from error

    async def close(self) -> None:
        """Close every connection. Idempotent."""
        await self._session.close()


_ADDRESS = "is the address right, and does a firewall let it through?"

_PLAIN_WORDS: Mapping[int, str] = {
    errno.ECONNREFUSED: "connection refused, nothing listens at its host and port: is it running, and is the "
    "URL right?",
    errno.ECONNRESET: "it closed the connection",
    errno.EPIPE: "it closed the connection",
    errno.ECONNABORTED: "it closed the connection",
    errno.ETIMEDOUT: f"its host does not answer: {_ADDRESS}",
    errno.EHOSTUNREACH: f"no route leads to its host: {_ADDRESS}",
    errno.ENETUNREACH: "no route leads to its network: is the address right?",
}


_TRUST = "set SSL_CERT_FILE to the file of the authority that signed it, or give the URL the name it is for"


def connection_failure(error: Exception) -> str:  # noqa: PLR0911 - one line for each thing that can be wrong
    """Return why a connection failed and what to change, in plain words. The text omits the address, which
    ``str(error)`` contains and clients must not see.
    """
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        error = error.certificate_error
    if isinstance(error, aiohttp.ClientConnectorSSLError):
        error = error.os_error
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its TLS certificate is not trusted here ({error.verify_message}): {_TRUST}"
    if isinstance(error, ssl.SSLError):
        return f"it does not speak TLS as expected ({_reason(error)}): is the URL http:// and not https://?"
    if isinstance(error, aiohttp.ClientConnectorDNSError | socket.gaierror):
        return "its host name is not known here (DNS): is the name in the URL right?"
    if isinstance(error, TimeoutError):
        return "it did not answer in time"
    if isinstance(error, aiohttp.ServerDisconnectedError | http.client.RemoteDisconnected):
        return "it closed the connection before it answered"
    if isinstance(error, aiohttp.ClientPayloadError | http.client.IncompleteRead):
        return "its answer broke off"
    if isinstance(error, aiohttp.ClientResponseError | http.client.HTTPException):
        return "what it answered is not HTTP: is the port right, and is the URL https:// and not http://?"
    if isinstance(error, aiohttp.InvalidURL):
        return "its URL cannot be read: is the host name in it right?"
    number = error.errno if isinstance(error, OSError) else None
    if number is None or number <= 0:
        return "the connection failed"
    return _PLAIN_WORDS.get(number) or f"the connection failed: {os.strerror(number)}"


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or "no reason given").lower().replace("_", " ")

"""Cross-origin rules for browsers: CORS, and the guard of routes that show or change the fleet."""

import re

from kvrouter.core.errors import ConfigError
from kvrouter.core.hosts import LOOPBACK, is_address
from kvrouter.frontend.errors import CrossSiteRefused, UnknownHost
from kvrouter.frontend.http import BadRequest, Request
from kvrouter.frontend.http.response import ResponseHeaders
from kvrouter.frontend.openai.form import UnsupportedMediaType
from kvrouter.frontend.page_route import NO_CONTENT_POLICY, Route
from kvrouter.settings.tree import FrontendSettings

ORIGIN = re.compile(rb"[a-z][a-z0-9+.-]*://[^/\s,*]+")
LEGS = (b"prefill", b"decode")
METHODS = b"GET, HEAD, POST, DELETE, OPTIONS"
EXPOSED_HEADERS = b", ".join(
    (
        b"x-request-id",
        b"retry-after",
        *(
            b"x-kvrouter-%b-%b" % (leg, suffix)
            for leg in LEGS
            for suffix in (b"worker", b"dp-rank", b"domain")
        ),
        b"x-kvrouter-overlap-blocks",
    )
)
"""Response headers that a page may read besides those that CORS always allows."""

JSON_TYPE = "application/json"
SAFE_METHODS = frozenset({"GET", "HEAD"})


def page_headers(route: Route | None) -> ResponseHeaders:
    """Return the security headers of a route's answers; ``route`` is None for an unknown path."""
    policy = NO_CONTENT_POLICY if route is None else route.policy
    return ((b"x-content-type-options", b"nosniff"), (b"content-security-policy", policy.encode()))


class Cors:
    """Builds CORS headers; ``origins`` is the setting, separated by commas.

    Raises ConfigError for an invalid origin: browsers compare origins character by character.
    """

    def __init__(self, origins: str) -> None:
        self._origins = frozenset(each.strip().encode() for each in origins.split(",") if each.strip())
        for origin in self._origins - {b"*"}:
            if ORIGIN.fullmatch(origin) is None:
                raise ConfigError(
                    f"--cors-origins: {origin.decode()!r} is no origin: a scheme, a host and perhaps a port, "
                    "as in https://chat.example.com",
                    param="cors_origins",
                )

    def headers(self, request: Request) -> ResponseHeaders:
        """Return the CORS headers of an answer, which let an admitted origin's page read it."""
        return self._headers(self._admitted((request.header("origin") or "").encode("latin-1")))

    def fault_headers(self, fault: BadRequest) -> ResponseHeaders:
        """Return the CORS headers of an early refusal. If no ``Origin`` was read and the setting names one
        origin alone, the headers are for that one.
        """
        origin = fault.header(b"origin")
        if not origin and len(self._origins) == 1:
            (origin,) = self._origins
        return self._headers(self._admitted(origin))

    def _headers(self, origin: bytes | None) -> ResponseHeaders:
        vary = () if b"*" in self._origins else ((b"vary", b"origin"),)
        if origin is None:
            return vary
        exposed = (b"access-control-expose-headers", EXPOSED_HEADERS)
        return ((b"access-control-allow-origin", origin), exposed, *vary)

    def preflight(self, request: Request) -> ResponseHeaders:
        """Return the additional headers that answer a preflight request."""
        if self._admitted((request.header("origin") or "").encode("latin-1")) is None:
            return ()
        requested = (request.header("access-control-request-headers") or "").encode("latin-1")
        headers = (b"access-control-allow-headers", requested) if requested else (b"vary", b"origin")
        return ((b"access-control-allow-methods", METHODS), headers, (b"access-control-max-age", b"3600"))

    def _admitted(self, origin: bytes) -> bytes | None:
        if not origin:
            return None
        if b"*" in self._origins:
            return b"*"
        return origin if origin in self._origins else None

    def names(self, origin: bytes) -> bool:
        """Whether the setting lists this origin by name, not by ``*``."""
        return origin in self._origins - {b"*"}

    @property
    def admits_all(self) -> bool:
        """Whether the setting is ``*``."""
        return b"*" in self._origins


class FleetGuard:
    """Refuses requests that a page of another origin makes a browser send to routes that show or change the
    fleet.

    Browsers add ``Origin`` or ``Sec-Fetch-Site``; clients, probes and scrapers send neither. Without an admin
    token, on a loopback address, the name in ``Host`` is checked too: after DNS rebinding to 127.0.0.1 a
    foreign page has the router's own origin for its browser.
    """

    def __init__(self, settings: FrontendSettings, cors: Cors | None) -> None:
        token = settings.admin_token
        has_token = token is not None and bool(token.get_secret_value())
        self._cors = cors
        # Without a token any page could change the fleet; "*" is meant for clients' calls.
        self._admits_all = has_token and cors is not None and cors.admits_all
        names = {_plain_name(name) for name in (settings.allowed_hosts or "").split(",") if name.strip()}
        is_checked = settings.http_host in LOOPBACK and not has_token and "*" not in names
        self._hosts = frozenset(names) if is_checked else None

    def check(self, request: Request) -> None:
        """Refuse a request that a page of another origin may have made.

        Raises :class:`CrossSiteRefused`, :class:`UnknownHost` and :class:`UnsupportedMediaType`.
        """
        self._check_host(request)
        why = self._why_foreign(request)
        if why is not None:
            raise CrossSiteRefused(
                f"{why}: pages of other origins may not ask this route; --cors-origins names those that may"
            )
        kind = _media_type(request)
        if request.body and kind != JSON_TYPE:
            sent = f"not {kind[:SHOWN_CHARS]}" if kind else "and it must be named"
            raise UnsupportedMediaType(
                f"content-type: this route takes {JSON_TYPE}, {sent}", param="content-type"
            )

    def check_call(self, request: Request) -> None:
        """Raise :class:`CrossSiteRefused` for a JSON call that a page of another origin sent with another
        content type: browsers send those, forms for example, without a preflight.
        """
        if _media_type(request) == JSON_TYPE or (self._cors is not None and self._cors.admits_all):
            return
        why = self._why_foreign(request)
        if why is not None:
            raise CrossSiteRefused(f"{why}: a page of another origin may send {JSON_TYPE} alone")

    def _why_foreign(self, request: Request) -> str | None:
        origin = (request.header("origin") or "").encode("latin-1")
        site = request.header("sec-fetch-site")
        if origin and self._cors is not None and (self._admits_all or self._cors.names(origin)):
            return None
        if site == "same-origin":
            return None
        if origin:
            host = (request.header("host") or "").encode("latin-1").lower()
            if not host or origin.lower().partition(b"://")[2] != host:
                return f"origin: {origin.decode('latin-1')[:SHOWN_CHARS]!r} is not this router's"
        elif site == "cross-site" or (site == "same-site" and request.method not in SAFE_METHODS):
            return f"sec-fetch-site: {site}"
        return None

    def _check_host(self, request: Request) -> None:
        if self._hosts is None:
            return
        name = _plain_name(request.header("host") or "")
        if name in self._hosts or _is_local(name):
            return
        raise UnknownHost(
            f"host: {name[:SHOWN_CHARS]!r} is no name of this router, which listens on a loopback address "
            "and has no admin token: --allowed-hosts says by which names it may be called"
        )


SHOWN_CHARS = 100


def _media_type(request: Request) -> str:
    return (request.header("content-type") or "").partition(";")[0].strip().lower()


def _plain_name(host: str) -> str:
    """Return a host in lower case, without port and brackets."""
    host = host.strip()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].rstrip(".").lower()


def _is_local(name: str) -> bool:
    """Whether no foreign page can have this host name: an IP address, localhost, or an empty name."""
    return name in ("", "localhost") or name.endswith(".localhost") or is_address(name)

"""Routes of pages: path matching, and the request and answer types of their handlers."""

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple
from urllib.parse import parse_qsl

import msgspec

from kvrouter.frontend.errors import JSON_HEADERS
from kvrouter.frontend.http import Request
from kvrouter.frontend.http.response import ResponseHeaders

NO_CONTENT_POLICY = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
"""The Content-Security-Policy of answers that are not web pages: a browser loads and runs nothing."""

GET, POST, DELETE = ("GET",), ("POST",), ("DELETE",)

_PARAMETER = re.compile(r"\{([a-z_]+)(:path)?\}")


class Page(NamedTuple):
    """A complete answer, sent with its length."""

    body: bytes = b""
    status: int = 200
    headers: ResponseHeaders = ()


def json_page(value: msgspec.Struct) -> Page:
    """Return an answer in JSON."""
    return Page(msgspec.json.encode(value), headers=JSON_HEADERS)


class PageRequest:
    """A request for a page, with the ``parameters`` of its path."""

    def __init__(self, request: Request, parameters: Mapping[str, str]) -> None:
        self.method, self.path, self.headers = request.method, request.path, request.headers
        self.parameters = parameters
        self.header = request.header
        self.take_body = request.take_body
        self._query = request.query

    @cached_property
    def query(self) -> dict[str, str]:
        """The query parameters; the last value of a repeated one."""
        return dict(parse_qsl(self._query, keep_blank_values=True))


Endpoint = Callable[[PageRequest], Awaitable[Page]]


class Route:
    """A page at a path template: ``{name}`` matches one path segment, ``{name:path}`` any number.

    ``summary`` and the types of the JSON ``answer`` and ``body``, None without JSON, are for
    ``/openapi.json``. ``policy`` is the Content-Security-Policy of the answers.
    """

    def __init__(
        self,
        path: str,
        endpoint: Endpoint,
        summary: str,
        *,
        methods: Sequence[str] = GET,
        answer: type[msgspec.Struct] | None = None,
        body: type[msgspec.Struct] | None = None,
        policy: str = NO_CONTENT_POLICY,
    ) -> None:
        self.path, self.endpoint, self.summary = path, endpoint, summary
        self.answer, self.body, self.policy = answer, body, policy
        self.methods = frozenset((*methods, "HEAD") if "GET" in methods else methods)
        self.parameters = [name for name, _ in _PARAMETER.findall(path)]
        literals = _PARAMETER.split(path)
        pattern = re.escape(literals[0])
        for name, many, literal in zip(literals[1::3], literals[2::3], literals[3::3], strict=True):
            pattern += f"(?P<{name}>{'.*' if many else '[^/]+'}){re.escape(literal)}"
        self._pattern = re.compile(pattern)

    def match(self, path: str) -> Mapping[str, str] | None:
        """Return the parameters of a matching path; None for another path."""
        found = self._pattern.fullmatch(path)
        return None if found is None else found.groupdict()


class PublicRoute(Route):
    """A route that pages of any origin may request: it neither changes nor shows the fleet. Every other route
    is guarded by :class:`~kvrouter.frontend.origins.FleetGuard`.
    """


class AdminRoute(Route):
    """A route that requires the admin token, if one is set."""

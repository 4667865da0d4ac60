"""The frontend's own errors, and the JSON form of every error."""

from collections.abc import Mapping, Sequence

import msgspec
from msgspec.structs import replace

from kvrouter.api.error_schema import ApiError, ErrorBody
from kvrouter.api.fleet_schema import ExpectedEngine
from kvrouter.core.errors import InvalidRequest, KvrouterError, NotFound, RoutingRefused, Unavailable
from kvrouter.frontend import http

JSON_HEADERS = ((b"content-type", b"application/json"),)
RETRY_AFTER_S = 1
"""The default ``Retry-After`` of a 503, in seconds."""


class UnknownWorker(InvalidRequest):
    """A request is pinned to an unknown worker or worker rank."""

    code = "unknown_worker"


class UnknownPath(NotFound):
    """No route has this path."""

    code = "not_found"


class RouteNotServed(NotFound):
    """The route is known, but the model's engines take tokens, not passed-through calls."""

    code = "route_not_served"


class UnknownDecision(NotFound):
    """No decision is kept for this request id."""

    code = "decision_not_found"


class MethodNotAllowed(InvalidRequest):
    """The route exists for other methods; ``allow`` lists them as the header does."""

    status_hint = 405
    code = "method_not_allowed"

    def __init__(self, message: str, *, allow: str) -> None:
        super().__init__(message)
        self.allow = allow


class CrossSiteRefused(KvrouterError):
    """A page of another origin made a browser send this request, which is not allowed."""

    status_hint = 403
    code = "cross_site_refused"
    type = "permission_error"


class UnknownHost(KvrouterError):
    """The name in ``Host`` is not one of this router's names."""

    status_hint = 403
    code = "unknown_host"
    type = "permission_error"


class NotReady(Unavailable):
    """No model has a worker, or a pair of workers, that can take a request.

    ``engine_problems`` are the engines that have no worker or a wrong URL.
    """

    code = "not_ready"

    def __init__(self, message: str, engine_problems: Sequence[ExpectedEngine] = ()) -> None:
        super().__init__(message)
        self.engine_problems = engine_problems


def refusal_counts(error: RoutingRefused) -> Mapping[str, int]:
    """Return the refused worker ranks per reason, with reasons as in JSON."""
    return {reason.value: count for reason, count in sorted(error.refusals.items())}


def error_body(error: KvrouterError) -> bytes:
    """Return the JSON body of an error; a refusal adds its role, its domain and its counts."""
    api_error = ApiError(message=error.message, type=error.type, param=error.param, code=error.code)
    if isinstance(error, RoutingRefused):
        api_error = replace(api_error, refusals=refusal_counts(error), role=error.role, domain=error.domain)
    if isinstance(error, NotReady) and error.engine_problems:
        api_error = replace(api_error, engine_problems=error.engine_problems)
    return msgspec.json.encode(ErrorBody(api_error))


def failure_body(error: KvrouterError, *, is_anthropic: bool) -> bytes:
    """Return the JSON body of an error in the form of the called API, OpenAI's or Anthropic's."""
    return anthropic_error_body(error) if is_anthropic else error_body(error)


def error_event(error: KvrouterError) -> bytes:
    """Return the event that ends a failed stream."""
    return http.sse_event(error_body(error))


_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Anthropic's error types by HTTP status; other statuses have one for 4xx and one for 5xx."""


def anthropic_error_body(error: KvrouterError) -> bytes:
    """Return the JSON body of an error in Anthropic's form, with ``code`` and ``param`` added."""
    return _anthropic_body(error.status_hint, error.message, error.code, error.param)


def anthropic_fault_body(fault: http.BadRequest) -> bytes:
    """Return the body of the HTTP server's own refusal in Anthropic's form."""
    return _anthropic_body(fault.status, fault.reason, fault.code, None)


def _anthropic_body(status: int, message: str, code: str, param: str | None) -> bytes:
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    error = {"type": kind, "message": message, "code": code, "param": param}
    return msgspec.json.encode({"type": "error", "error": error})


def anthropic_error_event(error: KvrouterError) -> bytes:
    """Return the event that ends a failed stream, in Anthropic's form."""
    return b"event: error\n" + http.sse_event(anthropic_error_body(error))


def error_headers(error: KvrouterError) -> tuple[tuple[bytes, bytes], ...]:
    """Return an error's headers: ``Retry-After`` of 429 and 503, or the header by which OpenAI's clients do
    not try again where no wait helps; and those that HTTP requires with 401 and 405.
    """
    if isinstance(error, MethodNotAllowed):
        return (*JSON_HEADERS, (b"allow", error.allow.encode()))
    if error.status_hint == 401:
        return (*JSON_HEADERS, (b"www-authenticate", b'Bearer realm="kvrouter"'))
    if error.status_hint in (429, 503):
        wait_s = error.retry_after_s if isinstance(error, RoutingRefused) else RETRY_AFTER_S
        if wait_s is None:
            return (*JSON_HEADERS, (b"x-should-retry", b"false"))
        return (*JSON_HEADERS, (b"retry-after", str(wait_s).encode()))
    return JSON_HEADERS

"""An HTTP client for a running router's API, used by commands."""

import http.client
import ssl
from collections.abc import Mapping
from typing import TypeVar
from urllib.parse import quote, urlencode, urlsplit

import msgspec

from kvrouter.api.cordon_schema import CordonBody
from kvrouter.api.health_schema import ModelList
from kvrouter.api.paths import ACCEPTING, CORDONS, DECISIONS, EXPLAIN, FLEET, FLOWS, METRICS, MODELS, READY
from kvrouter.core.errors import KvrouterError
from kvrouter.core.hosts import is_resolvable
from kvrouter.core.json import FLEET_TIMES, Unreadable, parsed

ANSWER_MAX_BYTES = 64 * 1024 * 1024
"""Longer answers are refused: no router sends one."""


class AskFailed(KvrouterError):
    """The router did not answer, or refused; ``router_code`` is the code of its error, empty without one, and
    ``status`` its HTTP status, None without an answer.
    """

    code = "ask_failed"

    def __init__(self, message: str, *, router_code: str = "", status: int | None = None) -> None:
        super().__init__(message)
        self.router_code = router_code
        self.status = status


class _ApiError(msgspec.Struct):
    """The fields read of an error. An engine's error, which a router passes on, may have others."""

    message: str
    code: object = None


class _ErrorBody(msgspec.Struct):
    error: _ApiError


class RouterClient:
    """A running router, by its URL: ``http://127.0.0.1:8000``."""

    def __init__(self, url: str, *, token: str | None = None, timeout_s: float = 30.0) -> None:
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise AskFailed(f"--url: must be http://host:port, not {url!r}: {error}") from error
        if parts.scheme not in ("http", "https") or not host or not is_resolvable(host):
            raise AskFailed(f"--url: must be http://host:port, not {url!r}")
        self._url = url
        self._https = parts.scheme == "https"
        self._host, self._port = host, port
        self._path = parts.path.rstrip("/")
        self._token = token
        self._timeout_s = timeout_s

    def only_model(self) -> str:
        """Return the only served model; raise AskFailed unless exactly one is served."""
        models = decode_answer(self.models(), ModelList).data
        if len(models) != 1:
            names = ", ".join(model.id for model in models) or "none"
            raise AskFailed(f"--model: is required: the router serves {names}")
        return models[0].id

    def explain(self, prompt: str, model: str, *, is_completion: bool) -> bytes:
        """Return the decision for ``prompt``, as a chat of one message or as a completion, as JSON."""
        _check_utf8("PROMPT", prompt)
        body: dict[str, object] = {"model": model}
        if is_completion:
            body["prompt"] = prompt
        else:
            body["messages"] = [{"role": "user", "content": prompt}]
        return self._ask("POST", EXPLAIN, body)

    def decisions(self, request_id: str) -> bytes:
        """Return the kept decisions of a request, one per attempt, as JSON."""
        _check_utf8("--request-id", request_id)
        return self._ask("GET", f"{DECISIONS}/{quote(request_id)}", None)

    @property
    def url(self) -> str:
        """The URL of the router."""
        return self._url

    def models(self) -> bytes:
        """Return the served models as JSON."""
        return self._ask("GET", MODELS, None)

    def ready(self) -> bytes:
        """Ask whether a plain request could be placed now; raise AskFailed with status 503 if not."""
        return self._ask("GET", READY, None)

    def accepting(self) -> bytes:
        """Ask whether a load balancer should send requests here; raise AskFailed with status 503 if not."""
        return self._ask("GET", ACCEPTING, None)

    def latest_decisions(self, limit: int) -> bytes:
        """Return the last decisions of the ``limit`` last requests as JSON."""
        return self._ask("GET", f"{DECISIONS}?limit={limit}", None)

    def fleet(self) -> bytes:
        """Return every worker and model as JSON."""
        return self._ask("GET", FLEET, None)

    def flows(self) -> bytes:
        """Return the KV handed over between domains as JSON."""
        return self._ask("GET", FLOWS, None)

    def metrics(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return self._ask("GET", METRICS, None)

    def cordons(self) -> bytes:
        """Return every cordon with its workers as JSON."""
        return self._ask("GET", CORDONS, None)

    def cordon(self, body: CordonBody) -> bytes:
        """Cordon the worker, node or domain in ``body``; return the change as JSON."""
        for name in body.__struct_fields__:
            text = getattr(body, name)
            if isinstance(text, str):
                _check_utf8(name, text)
        return self._ask("POST", CORDONS, body)

    def uncordon(self, level: str, name: str) -> bytes:
        """Remove the cordon; return the change as JSON."""
        _check_utf8("LEVEL", level)
        _check_utf8("NAME", name)
        return self._ask("DELETE", f"{CORDONS}?{urlencode({'level': level, 'name': name})}", None)

    def post(self, path: str, body: Mapping[str, object]) -> bytes:
        """``POST`` to a path of the router; return its answer as JSON."""
        return self._ask("POST", path, body)

    def _ask(self, method: str, path: str, body: Mapping[str, object] | CordonBody | None) -> bytes:
        connection = self._connect()
        headers = {"content-type": "application/json"} if body is not None else {}
        if self._token:
            headers["authorization"] = f"Bearer {self._token}"
        try:
            content = msgspec.json.encode(body) if body is not None else None
            connection.request(method, self._path + path, content, headers)
            response = connection.getresponse()
            answer = response.read(ANSWER_MAX_BYTES + 1)
        except (OSError, http.client.HTTPException) as error:
            from kvrouter.core.http_client import connection_failure  # noqa: PLC0415 - imported only on a failure

            raise AskFailed(f"{self._url}: no answer: {connection_failure(error)}") from error
        finally:
            connection.close()
        if len(answer) > ANSWER_MAX_BYTES:
            raise AskFailed(f"{self._url}: answered with more than {ANSWER_MAX_BYTES} bytes")
        if response.status != http.client.OK:
            api_error = _error(answer)
            raise AskFailed(
                f"{self._url}: {response.status} {api_error.message or response.reason}",
                router_code=api_error.code if isinstance(api_error.code, str) else "",
                status=response.status,
            )
        return answer

    def _connect(self) -> http.client.HTTPConnection:
        if self._https:
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(
                self._host, self._port, timeout=self._timeout_s, context=context
            )
        return http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)


T = TypeVar("T")


def decode_answer(answer: bytes, kind: type[T]) -> T:
    """Return a decoded answer; raise AskFailed when it does not have the form of a router's."""
    try:
        return parsed(msgspec.json.Decoder(kind), answer, times=FLEET_TIMES)
    except Unreadable as error:
        raise AskFailed(f"the answer is not a router's: {error}") from error


_error_bodies = msgspec.json.Decoder(_ErrorBody)


def _error(answer: bytes) -> _ApiError:
    try:
        return parsed(_error_bodies, answer).error
    except Unreadable:
        return _ApiError("")


def _check_utf8(name: str, text: str) -> None:
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise AskFailed(f"{name}: must be UTF-8 text")

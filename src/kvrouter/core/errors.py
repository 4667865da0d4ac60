"""The errors of kvrouter, each with the fields that explain it and a hint for the HTTP status.

::

    KvrouterError
    ├── InvalidRequest          400  the client's mistake; names the field
    │   ├── ContextLengthExceeded
    │   ├── NotFound            404  the named resource does not exist here
    │   │   └── UnknownModel
    │   └── BodyTooLarge        413
    ├── Unauthorized            401  an admin route without its token
    ├── Unavailable             503  not now; later it may be served
    │   ├── RoutingRefused           no worker may take this request now
    │   │   ├── NoEligibleWorker     no worker passes; counts per reason
    │   │   ├── AllWorkersBusy       workers pass, and each one is busy
    │   │   └── SloUnreachable  429  its first token would come too late
    │   ├── ModelNotReady            the model is loading, or this router does not know the models yet
    │   ├── RetryBodiesFull          the bodies kept for retries hold as much as they may
    │   ├── CordonsUnavailable       the store of cordons cannot be read or written
    │   ├── ShuttingDown             this router drains
    │   └── in other packages: the limits of frontend, text and router, each with its ``code``
    ├── WorkerFailed            502  engines failed; the tries are used up
    ├── DeadlineExceeded        504
    ├── ProtocolError           502  a peer sent an invalid message; names the field
    ├── InternalError           500  a bug in kvrouter
    └── ConfigError                  an invalid setting, fleet file or environment
        └── TopologyUnavailable      a worker's topology source never appeared
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:  # the command line reads errors before it needs msgspec
    from kvrouter.core.engine_answer import EngineAnswer

INTERRUPTED = 130
"""The exit code of a command that Ctrl-C ended: 128 and the number of the signal."""


class Reason(StrEnum):
    """Why one worker rank was refused for one request."""

    WRONG_ROLE = "wrong_role"
    PINNED_ELSEWHERE = "pinned_elsewhere"
    TAINT_MISSING = "taint_missing"
    DOMAIN_MISMATCH = "domain_mismatch"
    DOMAIN_UNKNOWN = "domain_unknown"
    CANNOT_TRANSFER = "cannot_transfer"
    EXCLUDED = "excluded"
    BUSY = "busy"
    NOT_ALIVE = "not_alive"
    DRAINING = "draining"
    CORDONED = "cordoned"
    ENGINE_SILENT = "engine_silent"
    CIRCUIT_OPEN = "circuit_open"
    KV_LOST = "kv_lost"
    CONTEXT_TOO_SHORT = "context_too_short"
    FAR_FROM_FRONTEND = "far_from_frontend"
    PROMPT_OUT_OF_RANGE = "prompt_out_of_range"
    TOO_LATE = "too_late"


class KvrouterError(Exception):
    """The base class. ``status_hint`` is the matching HTTP status, ``code`` a stable machine-readable name.

    ``answer`` is the engine's own error response, when there is one: the client gets it unchanged.
    """

    status_hint: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    type: ClassVar[str] = "server_error"

    def __init__(
        self, message: str, *, param: str | None = None, answer: "EngineAnswer | None" = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.answer = answer

    def add(self, detail: str, *, param: str | None) -> None:
        """Add a detail to the message; ``param`` becomes the field if none is named yet."""
        self.message = f"{self.message}; {detail}"
        self.args = (self.message,)
        self.param = self.param or param

    @property
    def http_status(self) -> int:
        """The HTTP status that a client gets: the engine's own, except for an error inside a stream."""
        return self.status_hint if self.answer is None or self.answer.is_events else self.answer.status


class InvalidRequest(KvrouterError):
    """The client's request is invalid; ``param`` names the field."""

    status_hint = 400
    code = "invalid_request"
    type = "invalid_request_error"


class ContextLengthExceeded(InvalidRequest):
    """The prompt, or the prompt and the answer together, do not fit into the model's context."""

    code = "context_length_exceeded"


class NotFound(InvalidRequest):
    """The resource that the request names does not exist here."""

    status_hint = 404
    code = "not_found"


class UnknownModel(NotFound):
    """The fleet is known, and no worker ever registered this model."""

    code = "model_not_found"


class BodyTooLarge(InvalidRequest):
    """The body is over the configured limit."""

    status_hint = 413
    code = "request_too_large"


class Unauthorized(KvrouterError):
    """An admin route was called without the token that is set."""

    status_hint = 401
    code = "unauthorized"
    type = "authentication_error"


class Unavailable(KvrouterError):
    """A valid request cannot be served now; a later try may succeed."""

    status_hint = 503
    code = "unavailable"
    type = "service_unavailable"


class RoutingRefused(Unavailable):
    """No worker may take the request now. ``refusals`` counts worker ranks per reason.

    ``retry_after_s`` is None where no wait helps. ``rows`` are routing's candidates, each with its reason;
    empty unless an explanation was asked for.
    """

    def __init__(
        self,
        message: str,
        *,
        refusals: Mapping[Reason, int],
        role: str | None = None,
        domain: str | None = None,
        retry_after_s: int | None = 1,
        param: str | None = None,
    ) -> None:
        super().__init__(message, param=param)
        self.refusals = dict(refusals)
        self.role = role
        self.domain = domain
        self.retry_after_s = retry_after_s
        self.rows: tuple[object, ...] = ()


class NoEligibleWorker(RoutingRefused):
    """No worker rank passes the request's constraints."""

    code = "no_eligible_worker"


class AllWorkersBusy(RoutingRefused):
    """Worker ranks pass the constraints, and each of them is over its busy threshold."""

    code = "all_workers_busy"


class SloUnreachable(RoutingRefused):
    """The first token is predicted to come too late to be of use. 429, because proxies send a 503 again."""

    status_hint = 429
    code = "slo_unreachable"
    type = "rate_limit_error"


class ModelNotReady(Unavailable):
    """The model cannot be served yet: its tokenizer is not loaded here, or this router does not know the
    fleet's models yet.
    """

    code = "model_not_ready"


class RetryBodiesFull(Unavailable):
    """The request bodies that are kept for retries have reached their limit of bytes."""

    code = "retry_bodies_full"


class CordonsUnavailable(Unavailable):
    """The store of cordons cannot be read or written."""

    code = "cordons_unavailable"


class ShuttingDown(Unavailable):
    """The router drains and takes no new requests."""

    code = "shutting_down"


class WorkerFailed(KvrouterError):
    """Engines failed this request, and it cannot be sent again."""

    status_hint = 502
    code = "worker_failed"
    type = "upstream_error"


class DeadlineExceeded(KvrouterError):
    """The request's deadline passed."""

    status_hint = 504
    code = "deadline_exceeded"
    type = "timeout_error"


class ProtocolError(KvrouterError):
    """A peer sent an invalid message; ``param`` names the field."""

    status_hint = 502
    code = "protocol_error"
    type = "upstream_error"


class InternalError(KvrouterError):
    """A bug in kvrouter; the log has its traceback."""


class ConfigError(KvrouterError):
    """A setting, a fleet file or an environment is invalid; ``param`` names it."""

    code = "invalid_config"


class TopologyUnavailable(ConfigError):
    """The transfer domain's file never appeared, or stayed empty."""

    code = "topology_unavailable"

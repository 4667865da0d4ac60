"""The frontend's metrics and log events."""

import logging
from collections.abc import Callable

from kvrouter.core.errors import KvrouterError
from kvrouter.frontend.http import HttpServer
from kvrouter.telemetry import Event, Telemetry, log_event

logger = logging.getLogger("kvrouter.frontend")

HINTS_LOGGED_MAX = 64
"""How many names of ignored routing hints are logged: clients can make up any number."""

UNKNOWN_MODEL = "unknown"
"""The label of calls that name no model that is served: what a client made up is no label."""


class FrontendInstrumentation:
    """The events of the frontend. What happens to a request behind it, the service reports."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._hints_logged: set[str] = set()
        self.tokenized = telemetry.tokenization_duration.observe
        """One prompt was templated and tokenized: seconds, and its model."""
        self.http_events, self.http_connections = telemetry.http_events, telemetry.http_connections

    def answered(self, *, route: str, model: str | None, status: int) -> None:
        """One call of a generation route was answered with this status (499: its client left first)."""
        self._telemetry.requests.inc(route, model or UNKNOWN_MODEL, str(status))

    def body_refused(self, bound: str) -> None:
        """A body held more than this bound allows."""
        self._telemetry.bodies_refused.inc(bound)

    def failed(self, error: KvrouterError, *, model: str | None = None) -> None:
        """One request was answered with this error, as a status or as the last event of its stream."""
        self._telemetry.errors.inc(model or UNKNOWN_MODEL, error.code)

    def error_answered(self, code: str) -> None:
        """The HTTP server answered with an error by itself."""
        self._telemetry.errors.inc(UNKNOWN_MODEL, code)

    def prompt_refused(self, code: str) -> None:
        """A prompt was not tokenized, or not to its end."""
        self._telemetry.prompts_refused.inc(code)

    def tokenizing(self, held_bytes: int) -> None:
        """What the prompts that are being tokenized are counted to hold."""
        self._telemetry.tokenize_bytes.set(held_bytes)

    def thresholds_set(self, *, model: str, decode_blocks: float | None, prefill_tokens: int | None) -> None:
        """A model's busy thresholds were set."""
        log_event(
            logger,
            Event.BUSY_THRESHOLD,
            model=model,
            active_decode_blocks_threshold=decode_blocks,
            active_prefill_tokens_threshold=prefill_tokens,
        )

    def routing_hint_ignored(self, at: str, what: str) -> None:
        """A routing hint of a request was ignored; logged once for each name, as long as there are few."""
        name = at.partition("[")[0]
        if name in self._hints_logged or len(self._hints_logged) >= HINTS_LOGGED_MAX:
            return
        self._hints_logged.add(name)
        log_event(logger, Event.ROUTING_HINT_IGNORED, detail=f"{at}: {what}")

    def watch(self, server: HttpServer) -> Callable[[], None]:
        """Read what the server holds before each scrape, until what is returned is called."""
        held = self._telemetry.http_upload_bytes
        return self._telemetry.before_scrape(lambda: held.set(server.uploads.bytes))

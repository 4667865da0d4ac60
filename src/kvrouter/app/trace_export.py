"""Request tracing: sets up OpenTelemetry's SDK from its own ``OTEL_…`` variables."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from importlib import import_module
from typing import TYPE_CHECKING

from kvrouter.core.errors import ConfigError
from kvrouter.telemetry import Event, log_event
from kvrouter.telemetry.logs import LogThrottle

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

    from kvrouter.frontend.tracing import RequestTracing

logger = logging.getLogger("kvrouter.tracing")

EXPORTER = "OTEL_TRACES_EXPORTER"
ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")

FLUSH_LIMIT_S = 5.0
"""Seconds that the last spans may take to be sent at the end."""


def asks_for_traces(environ: Mapping[str, str]) -> bool:
    """Whether the variables ask for spans: they name an endpoint or an exporter, and do not disable the SDK.
    Otherwise requests are not traced, although the SDK's default is a collector on this host.
    """
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    exporter = environ.get(EXPORTER, "").strip().lower()
    return exporter != "none" and bool(exporter or any(environ.get(name) for name in ENDPOINTS))


@asynccontextmanager
async def tracing(environ: Mapping[str, str], *, version: str) -> AsyncIterator["RequestTracing | None"]:
    """Yield the request tracing that the variables ask for; None where they ask for none, or the extra is not
    installed, which is logged.

    Raises ConfigError naming the variable for an unavailable exporter or protocol.
    """
    if not asks_for_traces(environ):
        yield None
        return
    try:
        from opentelemetry.sdk.resources import (  # noqa: PLC0415 - an extra
            OTELResourceDetector,
            Resource,
        )
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415

        from kvrouter.frontend.tracing import RequestTracing  # noqa: PLC0415
    except ImportError:
        log_event(
            logger,
            Event.CONFIG_WARNING,
            detail="OTEL_ variables ask for traces, and OpenTelemetry is not installed: no span is sent. "
            "Install kvrouter[otel], or set OTEL_SDK_DISABLED=true",
        )
        yield None
        return
    resource = Resource({"service.name": "kvrouter", "service.version": version})
    forwarded = _SdkLog()
    logging.getLogger("opentelemetry").addHandler(forwarded)
    try:
        provider = TracerProvider(
            resource=resource.merge(OTELResourceDetector().detect()), shutdown_on_exit=False
        )
        provider.add_span_processor(BatchSpanProcessor(_exporter(environ)))
    except ValueError as error:
        raise ConfigError(f"OTEL_ variables: {error}", param="OTEL_") from error
    forwarded.is_set_up = True
    try:
        yield RequestTracing(provider.get_tracer("kvrouter", version))
    finally:
        if await _ended(provider.shutdown, FLUSH_LIMIT_S):
            logging.getLogger("opentelemetry").removeHandler(forwarded)
        else:
            log_event(logger, Event.SPANS_NOT_SENT, reason=f"the last ones, within {FLUSH_LIMIT_S:g} s")


async def _ended(shutdown: Callable[[], None], limit_s: float) -> bool:
    """Shut the SDK down; return False when that takes longer than the limit. It may wait for an unreachable
    collector, so it runs in a daemon thread that does not delay the process's end.
    """
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()

    def end() -> None:
        shutdown()
        with suppress(RuntimeError):  # the loop is closed already
            loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=end, name="kvrouter-spans", daemon=True).start()
    try:
        await asyncio.wait_for(ended.wait(), limit_s)
    except TimeoutError:
        return False
    return True


def _exporter(environ: Mapping[str, str]) -> "SpanExporter":
    exporter = environ.get(EXPORTER, "").strip().lower() or "otlp"
    if exporter == "console":
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter  # noqa: PLC0415 - an extra

        return ConsoleSpanExporter()
    if exporter != "otlp":
        raise ConfigError(f"{EXPORTER}: must be otlp, console or none, not {exporter!r}", param=EXPORTER)
    name = next((name for name in PROTOCOLS if environ.get(name)), PROTOCOLS[0])
    protocol = environ.get(name, "").strip().lower() or "http/protobuf"
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415

        return OTLPSpanExporter()
    if protocol != "grpc":
        raise ConfigError(f"{name}: must be http/protobuf or grpc, not {protocol!r}", param=name)
    try:
        trace_exporter = import_module("opentelemetry.exporter.otlp.proto.grpc.trace_exporter")
    except ImportError as error:
        raise ConfigError(
            f"{name}: grpc needs the package opentelemetry-exporter-otlp-proto-grpc", param=name
        ) from error
    grpc: SpanExporter = trace_exporter.OTLPSpanExporter()
    return grpc


class _SdkLog(logging.Handler):
    """Logs the SDK's own errors as events, at most one a minute. During set-up only their format is logged,
    since arguments may quote variables that hold keys.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._throttle = LogThrottle()
        self.is_set_up = False

    def emit(self, record: logging.LogRecord) -> None:
        """Log one of the SDK's records."""
        reason = record.getMessage() if self.is_set_up else str(record.msg)
        if self._throttle.allows(str(record.msg)):
            log_event(logger, Event.SPANS_NOT_SENT, reason=reason)

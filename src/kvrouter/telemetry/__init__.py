"""Telemetry: every metric and every log event, each in one table."""

from kvrouter.telemetry.families import (
    CounterFamily,
    GaugeFamily,
    HistogramFamily,
    MetricsFormat,
    MetricSpec,
)
from kvrouter.telemetry.gen_ai import GenAiMetrics, wants_gen_ai
from kvrouter.telemetry.log_events import Event, Fields, log_enabled_event, log_event
from kvrouter.telemetry.logs import configure_logging
from kvrouter.telemetry.metrics import OperatorTelemetry, Telemetry

__all__ = [
    "CounterFamily",
    "Event",
    "Fields",
    "GaugeFamily",
    "GenAiMetrics",
    "HistogramFamily",
    "MetricSpec",
    "MetricsFormat",
    "OperatorTelemetry",
    "Telemetry",
    "configure_logging",
    "log_enabled_event",
    "log_event",
    "wants_gen_ai",
]

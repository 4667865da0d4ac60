"""Telemetry: every metric and every log event, each in one table."""

from kvrouter.telemetry.events import EVENTS, Event, Fields, log_event
from kvrouter.telemetry.families import CounterFamily, GaugeFamily, HistogramFamily, MetricSpec
from kvrouter.telemetry.logs import configure_logging
from kvrouter.telemetry.metrics import METRICS_CONTENT_TYPE, OperatorTelemetry, Telemetry

__all__ = [
    "EVENTS",
    "METRICS_CONTENT_TYPE",
    "CounterFamily",
    "Event",
    "Fields",
    "GaugeFamily",
    "HistogramFamily",
    "MetricSpec",
    "OperatorTelemetry",
    "Telemetry",
    "configure_logging",
    "log_event",
]

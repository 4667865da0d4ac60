"""What the service tells about itself: every metric and every log event, each in one table."""

from kvrouter.telemetry.events import EVENTS, Event, Fields, log_event
from kvrouter.telemetry.families import CounterFamily, GaugeFamily, HistogramFamily
from kvrouter.telemetry.logs import configure_logging
from kvrouter.telemetry.metrics import METRICS_CONTENT_TYPE, Telemetry
from kvrouter.telemetry.operator import OperatorTelemetry
from kvrouter.telemetry.table import MetricSpec

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

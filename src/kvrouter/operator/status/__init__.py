"""What is told of a deployment: conditions that people can act on, pods by domain, and events."""

from kvrouter.operator.status.domains import Places, balance_of, places_of
from kvrouter.operator.status.events import Event, EventType, events_of
from kvrouter.operator.status.status import deployment_status, unreadable_status
from kvrouter.operator.status.workloads import component_status

__all__ = [
    "Event",
    "EventType",
    "Places",
    "balance_of",
    "component_status",
    "deployment_status",
    "events_of",
    "places_of",
    "unreadable_status",
]

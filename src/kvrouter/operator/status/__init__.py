"""What is told of a deployment: conditions that people can act on, pods by domain, and events."""

from kvrouter.operator.status.available import Registered, Workers, role_mistakes, serves
from kvrouter.operator.status.domains import Places, balance_of, places_of
from kvrouter.operator.status.events import Event, EventType, events_of
from kvrouter.operator.status.status import deployment_status, unreadable_status
from kvrouter.operator.status.workloads import NAME_TAKEN_MEND, Refusals, component_status, refused_pods

__all__ = [
    "NAME_TAKEN_MEND",
    "Event",
    "EventType",
    "Places",
    "Refusals",
    "Registered",
    "Workers",
    "balance_of",
    "component_status",
    "deployment_status",
    "events_of",
    "places_of",
    "refused_pods",
    "role_mistakes",
    "serves",
    "unreadable_status",
]

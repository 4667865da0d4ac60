"""The status of a deployment: conditions, pods by domain, events."""

from kvrouter.operator.status.available import Registered, Workers, role_mistakes, serves
from kvrouter.operator.status.domains import balance_of
from kvrouter.operator.status.finding import ConditionEvent, EventType, events_of
from kvrouter.operator.status.links import LINK_SERIES, Door, door_of, read_links, steadied
from kvrouter.operator.status.resolved import NAME_TAKEN_FIX, RefusedObjects, component_status, refused_pods
from kvrouter.operator.status.stalled import Rollout, pull_ends_s, rollout_of
from kvrouter.operator.status.status import deployment_status, unreadable_status

__all__ = [
    "LINK_SERIES",
    "NAME_TAKEN_FIX",
    "ConditionEvent",
    "Door",
    "EventType",
    "RefusedObjects",
    "Registered",
    "Rollout",
    "Workers",
    "balance_of",
    "component_status",
    "deployment_status",
    "door_of",
    "events_of",
    "pull_ends_s",
    "read_links",
    "refused_pods",
    "role_mistakes",
    "rollout_of",
    "serves",
    "steadied",
    "unreadable_status",
]

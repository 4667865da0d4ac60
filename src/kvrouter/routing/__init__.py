"""The decision: eligibility, cost, pick, the prefill and decode pair, and why."""

from kvrouter.routing.decision import Candidate, Decision, Pick
from kvrouter.routing.request import RouteRequest, View
from kvrouter.routing.route import route, route_decode
from kvrouter.routing.settings import RoutingSettings

__all__ = [
    "Candidate",
    "Decision",
    "Pick",
    "RouteRequest",
    "RoutingSettings",
    "View",
    "route",
    "route_decode",
]

"""The decision: eligibility, cost, pick, the prefill and decode pair, and why."""

from kvrouter.kernel.routing.request import Candidate, Decision, Pick, RouteRequest, RoutingSettings, View
from kvrouter.kernel.routing.route import route, route_decode

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

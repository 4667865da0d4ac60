"""The decision: eligibility, cost, pick, the prefill and decode pair, and why."""

from kvrouter.routing.request import Candidate, Decision, Pick, RouteRequest, RoutingSettings, View
from kvrouter.routing.route import route, route_decode

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

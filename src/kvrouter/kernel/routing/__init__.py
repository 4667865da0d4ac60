"""Routing decisions: eligibility, costs, the pick of a worker or pair, and explanations."""

from kvrouter.kernel.routing.interface import Candidate, Decision, Pick, RouteRequest, RoutingSettings, View
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

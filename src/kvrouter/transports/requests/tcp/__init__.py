"""Requests over tcp: one multiplexed connection for each pair of router and worker.

``plane`` is the router's side and ``acceptor`` the workers'; each connection has a ``router_end`` and a
``worker_end``, which share ``connection``; ``stream`` and ``answer`` are the two ends of one leg. The bytes
are in ``hello`` and ``frames``, written down in ``docs/wire.md``.
"""

from kvrouter.transports.requests.tcp.acceptor import ROUTERS_MAX, TcpRequestAcceptor
from kvrouter.transports.requests.tcp.plane import TcpRequestPlane

__all__ = ["ROUTERS_MAX", "TcpRequestAcceptor", "TcpRequestPlane"]

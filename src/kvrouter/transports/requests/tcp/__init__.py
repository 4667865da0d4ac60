"""Requests over tcp: one multiplexed connection for each pair of router and worker.

A connection carries a session (:mod:`kvrouter.transports.requests.session`); ``plane`` is the
router's side and ``acceptor`` the workers'. The bytes are written down in ``docs/wire.md``.
"""

from kvrouter.transports.requests.tcp.acceptor import TcpRequestAcceptor
from kvrouter.transports.requests.tcp.plane import TcpRequestPlane

__all__ = ["TcpRequestAcceptor", "TcpRequestPlane"]

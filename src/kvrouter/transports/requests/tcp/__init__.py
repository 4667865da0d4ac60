"""Requests over tcp: one multiplexed connection for each pair of router and worker.

A connection carries a session (:mod:`kvrouter.transports.requests.session`); ``transport`` is the
router's end, ``acceptor`` the workers', ``pipe`` what both share. ``docs/wire.md`` has the format.
"""

from kvrouter.transports.requests.tcp.acceptor import TcpRequestAcceptor
from kvrouter.transports.requests.tcp.transport import TcpRequestTransport

__all__ = ["TcpRequestAcceptor", "TcpRequestTransport"]

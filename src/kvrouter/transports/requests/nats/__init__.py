"""Requests over NATS: the session of ``transports.requests.session`` over messages.

=============================================================  ===============================================
subject                                                        subscriber
=============================================================  ===============================================
``kvrouter.<namespace>.requests.2.<worker id>.<incarnation>``  a worker: the messages of routers, in order
``kvrouter.<namespace>.answers.<router>.<link>``               a router: the messages of one session
=============================================================  ===============================================

Every message begins with a MAC by the shared token, and carries what its sender's session sent in one turn of
the event loop, of all legs, split where it exceeds the largest message.

NATS delivers at most once: messages are counted, and a missing one ends its session. So a session gives the
same guarantee as over tcp: its messages arrive in order, or it ends.
"""

from kvrouter.transports.requests.nats.acceptor import NatsRequestAcceptor
from kvrouter.transports.requests.nats.transport import NatsRequestTransport

__all__ = ["NatsRequestAcceptor", "NatsRequestTransport"]

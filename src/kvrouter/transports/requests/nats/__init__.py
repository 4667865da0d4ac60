"""Requests over NATS: the session of :mod:`kvrouter.transports.requests.session` over messages.

=============================================================  ===============================================
subject                                                        who listens
=============================================================  ===============================================
``kvrouter.<namespace>.requests.2.<worker id>.<incarnation>``  a worker: what routers say, in order
``kvrouter.<namespace>.answers.<router>.<link>``               a router: the answers of one worker, a session
=============================================================  ===============================================

Every message begins with a proof that its sender knows the token, and carries what its sender had to say in
one turn of its loop, of all legs. What is longer than a message comes in several.

NATS delivers at most once: messages are counted, and one that is missing ends its session. So a session is as
good as one over tcp: what it says arrives in order, or it is over.
"""

from kvrouter.transports.requests.nats.acceptor import NatsRequestAcceptor
from kvrouter.transports.requests.nats.plane import NatsRequestPlane

__all__ = ["NatsRequestAcceptor", "NatsRequestPlane"]

"""Requests over NATS.

===========================================================  =================================================
subject                                                      who listens
===========================================================  =================================================
``kvrouter.<namespace>.requests.<worker id>.<incarnation>``  a worker: requests, credits, cancellations and
                                                             pulses, in the order in which they were sent
``kvrouter.<namespace>.answers.<router>.<link>``             a router: the answers of one worker
===========================================================  =================================================

Every message begins with a proof that its sender knows the token, and carries what its sender had to say in
one turn of its loop, of all legs (:mod:`.frames`). A request that is larger than a message comes in parts.

NATS delivers at most once, so nothing is taken on trust: the frames of a leg are numbered, and one that is
missing breaks the leg. Routers send a pulse to every worker that they follow or that runs legs for them, with
the legs that they know and what each may send; the worker answers with the legs that it knows and how far it
got. So a lost credit is repeated, a lost cancellation noticed, and a lost last frame too. An end that is not
heard for some time is lost.
"""

from kvrouter.transports.requests.nats.acceptor import NatsRequestAcceptor
from kvrouter.transports.requests.nats.plane import NatsRequestPlane

__all__ = ["NatsRequestAcceptor", "NatsRequestPlane"]

"""Requests over HTTP/1.1: a leg is one POST with a streamed answer.

======  ==========================================  =========================================================
method  path                                        what
======  ==========================================  =========================================================
POST    ``/v1/legs/<worker id>/<incarnation>``      body: the request as msgpack; 200 once the worker took
                                                    it, then frames (:mod:`.frames`); else a refusal, msgpack
DELETE  ``/v1/legs/<worker id>/<incarnation>/<n>``  cancel leg ``n``; body: the reason, UTF-8
GET     ``/health/<worker id>/<incarnation>``       204 while that worker serves, 404 when it does not
GET     ``/health``                                 204: the listener answers; for probes, without a token
======  ==========================================  =========================================================

Every request but the last has ``authorization: Bearer <token>`` and ``x-kvrouter-router: <router>``, and a
POST has ``x-kvrouter-leg: <n>``. A router polls the health of every worker that runs legs for it; a worker
cancels the legs of a router whose polls stop.

Back-pressure is TCP's own: both ends keep their buffers small, and every leg has its own connection while it
runs, so that a reader that stops reading stops its own producer only.
"""

from kvrouter.transports.requests.http.acceptor import HttpRequestAcceptor
from kvrouter.transports.requests.http.connections import CONNECTIONS_MAX
from kvrouter.transports.requests.http.transport import HttpRequestTransport

__all__ = ["CONNECTIONS_MAX", "HttpRequestAcceptor", "HttpRequestTransport"]

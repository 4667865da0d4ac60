"""An HTTP/1.1 server for streams: a sans-I/O connection, an asyncio driver.

It is independent of routing and of OpenAI's API, except for the form of errors. A handler gets a
:class:`Request` and a :class:`Responder`.
"""

from kvrouter.frontend.http.limits import BodyLimit, Limits
from kvrouter.frontend.http.protocol import Handler, HttpEvent
from kvrouter.frontend.http.response import (
    SSE_DONE,
    SSE_FILLER,
    UPLOAD_TOO_SLOW,
    UPLOADS_FULL,
    BadRequest,
    Disconnect,
    Disconnected,
    ErrorAnswer,
    Request,
    Responder,
    Stream,
    sse_event,
)
from kvrouter.frontend.http.server import HttpServer, Observer

__all__ = [
    "SSE_DONE",
    "SSE_FILLER",
    "UPLOADS_FULL",
    "UPLOAD_TOO_SLOW",
    "BadRequest",
    "BodyLimit",
    "Disconnect",
    "Disconnected",
    "ErrorAnswer",
    "Handler",
    "HttpEvent",
    "HttpServer",
    "Limits",
    "Observer",
    "Request",
    "Responder",
    "Stream",
    "sse_event",
]

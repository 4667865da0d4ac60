"""The end of ZeroMQ contexts, off the event loop: libzmq may wait for ever for sockets that are closed."""

from threading import Thread
from typing import Any

import zmq

TERM_LIMIT_S = 5.0
"""How long to wait for a context whose ports are to be free."""


def end_context(context: "zmq.Context[Any]") -> Thread:
    """Terminate a context whose sockets are closed; return the daemon thread that waits for it."""
    ending = Thread(target=context.term, name="end of a ZeroMQ context", daemon=True)
    ending.start()
    return ending

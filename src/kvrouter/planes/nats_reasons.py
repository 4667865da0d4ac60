"""What went wrong with NATS, in words that a person can act on."""

from nats.js.errors import APIError, ServiceUnavailableError

NO_JETSTREAM = "this NATS server has no JetStream: start nats-server with -js"
NO_ANSWER = "NATS did not answer in time"
NO_ROOM = "JetStream has no room for it: free its disk, or give it more (max_file_store)"

_NO_ROOM_CODES = frozenset({10002, 10023, 10047})
"""The server's codes for too little storage: of an account, of the cluster, of the server."""


def reason(error: BaseException) -> str:
    """What ``error`` says, in a line; some errors of the client say nothing, or nothing that helps."""
    if isinstance(error, ServiceUnavailableError) and error.code is None:
        # The client's own: nobody listens where JetStream answers. One of the server has a code.
        return NO_JETSTREAM
    if isinstance(error, APIError) and error.description:
        if error.err_code in _NO_ROOM_CODES:
            return f"{NO_ROOM} ({error.description})"
        return f"{error.description} (NATS error {error.err_code})"
    if isinstance(error, TimeoutError) and str(error) in ("", "nats: timeout"):
        return NO_ANSWER
    return str(error) or type(error).__name__

"""What went wrong with NATS, in words that a person can act on."""

from nats.js.errors import ServiceUnavailableError

NO_JETSTREAM = "this NATS server has no JetStream: start nats-server with -js"


def reason(error: BaseException) -> str:
    """What ``error`` says, in a line; some errors of the client say nothing, or nothing that helps."""
    if isinstance(error, ServiceUnavailableError) and error.code is None:
        # The client's own: nobody listens where JetStream answers. One of the server has a code.
        return NO_JETSTREAM
    return str(error) or type(error).__name__

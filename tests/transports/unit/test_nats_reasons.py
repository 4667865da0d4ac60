"""Errors of the NATS client, in words that a person can act on."""

import nats.errors
import pytest
from nats.js.errors import APIError, ServiceUnavailableError

from kvrouter.transports.nats_client import NO_ANSWER, NO_JETSTREAM, reason


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ServiceUnavailableError(), NO_JETSTREAM),
        (nats.errors.TimeoutError(), NO_ANSWER),
        (TimeoutError(), NO_ANSWER),
        (TimeoutError("the directory did not answer"), "the directory did not answer"),
        (
            APIError(code=500, err_code=10047, description="insufficient storage resources available"),
            "JetStream has no room for it: free its disk, or give it more (max_file_store) "
            "(insufficient storage resources available)",
        ),
        (
            APIError(
                code=500, err_code=10074, description="replicas > 1 not supported in non-clustered mode"
            ),
            "replicas > 1 not supported in non-clustered mode (NATS error 10074)",
        ),
        (ConnectionError("not connected to NATS"), "not connected to NATS"),
        (ConnectionError(), "ConnectionError"),
    ],
)
def test_nats_error_gives_an_actionable_reason(error: Exception, words: str) -> None:
    assert reason(error) == words

"""The request transports that every contract suite of requests runs over."""

from collections.abc import AsyncIterator

import pytest

from tests.testing.request_transports import (
    PROXIED_REQUEST_TRANSPORTS,
    REQUEST_TRANSPORTS,
    RequestTransportSetup,
)


@pytest.fixture(params=sorted(REQUEST_TRANSPORTS))
async def setup(request: pytest.FixtureRequest) -> AsyncIterator[RequestTransportSetup]:
    """Each transport."""
    of = await REQUEST_TRANSPORTS[request.param]()
    yield of
    await of.close()


@pytest.fixture(params=sorted(PROXIED_REQUEST_TRANSPORTS))
async def far(request: pytest.FixtureRequest) -> AsyncIterator[RequestTransportSetup]:
    """Each transport over a network that can fail."""
    of = await PROXIED_REQUEST_TRANSPORTS[request.param]()
    yield of
    await of.close()

"""The browser of the tests of pages."""

from collections.abc import AsyncIterator

import pytest

from tests.system.browser.driver import Browser, browser


@pytest.fixture
async def chromium() -> AsyncIterator[Browser]:
    async with browser() as opened:
        yield opened

"""Waiting for what nobody announces."""

import asyncio
from collections.abc import Callable
from itertools import count

LIMIT_S = 180.0
"""Only a test that fails waits as long as this."""

QUICK_TURNS = 100
"""So many turns of the loop pass without a rest: what this process does itself is there by then."""

REST_S = 0.002


async def until(holds: Callable[[], bool]) -> None:
    """Return once ``holds``; fail when it does not for :data:`LIMIT_S`."""
    loop = asyncio.get_running_loop()
    last_s = loop.time() + LIMIT_S
    for turn in count():
        if holds():
            return
        assert loop.time() < last_s, "what the test waits for does not come"
        await asyncio.sleep(0 if turn < QUICK_TURNS else REST_S)

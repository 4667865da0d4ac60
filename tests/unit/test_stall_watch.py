"""Whose silence it is."""

import asyncio
import time

from kvrouter.service.attempt import Phase, StallWatch, Timeouts, TooLong
from tests.support.waits import until

PATIENCE = Timeouts(prefill_s=60.0, first_token_s=60.0, between_tokens_s=0.2, request_s=60.0)


async def test_a_process_that_stood_still_takes_no_worker_for_silent() -> None:
    reported: list[TooLong] = []
    watch = StallWatch(PATIENCE, lambda kind, _: reported.append(kind))
    watch.is_reading = True
    watch.enter(Phase.STREAMING)
    time.sleep(0.5)  # noqa: ASYNC251
    for _ in range(4):  # what came meanwhile is read a few turns later
        await asyncio.sleep(0)
    assert reported == []
    watch.heard_s = time.monotonic()
    await asyncio.sleep(0.05)
    assert reported == []
    await until(lambda: reported == [TooLong.SILENCE])
    watch.stop()

"""Whose silence it is."""

import asyncio
import time
from dataclasses import replace

from kvrouter.router.stall_watch import Phase, StallWatch, Timeouts, TooLong
from kvrouter.transports.background import LATE_S, DueTimes
from tests.testing.virtual_time import in_virtual_time
from tests.testing.waits import until

PATIENCE = Timeouts(prefill_s=60.0, first_token_s=60.0, between_tokens_s=0.2, request_s=60.0)


@in_virtual_time
async def test_a_blocked_event_loop_does_not_count_as_worker_silence() -> None:
    reported: list[TooLong] = []
    watch = StallWatch(PATIENCE, DueTimes(StallWatch.check), lambda kind, _: reported.append(kind))
    watch.enter(Phase.STREAMING)
    watch.resume(progressed=True)
    time.sleep(0.5)  # noqa: ASYNC251
    for _ in range(4):  # what came meanwhile is read a few turns later
        await asyncio.sleep(0)
    assert reported == []
    watch.progress_s = time.monotonic()
    due_s = watch.progress_s + PATIENCE.between_tokens_s
    assert watch.check(watch.progress_s + 0.1, 0.0) == due_s
    await until(lambda: reported == [TooLong.SILENCE])
    watch.stop()


@in_virtual_time
async def test_a_silence_is_prolonged_once_where_every_check_is_late() -> None:
    reported: list[TooLong] = []
    watch = StallWatch(PATIENCE, DueTimes(StallWatch.check), lambda kind, _: reported.append(kind))
    watch.enter(Phase.STREAMING)
    watch.resume(progressed=True)
    late_s = 2 * LATE_S
    for _ in range(2):
        watch.progress_s += 1.0  # a token came
        now_s = watch.progress_s + PATIENCE.between_tokens_s
        assert watch.check(now_s, late_s) == now_s + PATIENCE.between_tokens_s
        assert reported == []
    assert watch.check(now_s + PATIENCE.between_tokens_s, late_s) is None
    assert reported == [TooLong.SILENCE]
    watch.stop()


@in_virtual_time
async def test_the_clients_read_time_does_not_count_as_worker_silence() -> None:
    reported: list[float] = []
    limit_s = 0.8
    watch = StallWatch(
        replace(PATIENCE, between_tokens_s=limit_s),
        DueTimes(StallWatch.check),
        lambda _, silent_s: reported.append(silent_s),
    )
    watch.enter(Phase.STREAMING)
    watch.resume(progressed=True)
    for _ in range(3):  # a comment comes at once, and its client takes its time
        watch.pause()
        await asyncio.sleep(0.6)
        watch.resume(progressed=False)
        await asyncio.sleep(0.1)
    assert reported == []
    await until(lambda: bool(reported))
    assert limit_s <= reported[0] < limit_s + 3 * 0.6, "not all of the client's time is in it"
    watch.stop()

"""Background tasks whose errors are reported at once, and periodic ticks."""

import asyncio
from collections.abc import Coroutine

from kvrouter.core.clock import AwakeClock


def go_on(work: Coroutine[None, None, None], *, name: str) -> asyncio.Task[None]:
    """Begin ``work`` in a task that the caller keeps; what it raises goes to the loop's exception handler.

    The exception of a task that somebody keeps is not reported until the task is collected: a heartbeat that
    stopped would be found by its absence.
    """
    task = asyncio.get_running_loop().create_task(work, name=name)
    task.add_done_callback(_report_mistake)
    return task


def _report_mistake(task: asyncio.Task[None]) -> None:
    error = None if task.cancelled() else task.exception()
    if error is not None:
        task.get_loop().call_exception_handler(
            {"message": f"{task.get_name()}: ended by a mistake", "exception": error, "task": task}
        )


async def tick(clock: AwakeClock) -> None:
    """Wait for the clock's next tick."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    await asyncio.sleep(clock.every_s)
    clock.advance(loop.time() - began_s)

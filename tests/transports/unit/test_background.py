"""What goes on next to everything else does not end in silence."""

import asyncio
from typing import Any

import pytest

from kvrouter.transports.background import spawn
from kvrouter.transports.requests.port import LivenessListeners


@pytest.fixture
async def reported() -> list[dict[str, Any]]:
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: reported.append(context))
    return reported


async def test_failed_task_is_reported_at_once_while_still_referenced(
    reported: list[dict[str, Any]],
) -> None:
    async def fail() -> None:
        raise ZeroDivisionError

    task = spawn(fail(), name="hearts: beat")
    await asyncio.wait([task])
    await asyncio.sleep(0)
    assert [str(context["message"]) for context in reported] == ["hearts: beat: ended by a mistake"]
    assert isinstance(reported[0]["exception"], ZeroDivisionError)


async def test_finished_or_cancelled_task_is_not_reported(reported: list[dict[str, Any]]) -> None:
    ended, cancelled = spawn(asyncio.sleep(0), name="ends"), spawn(asyncio.sleep(1e6), name="is cancelled")
    cancelled.cancel()
    await asyncio.wait([ended, cancelled])
    await asyncio.sleep(0)
    assert reported == []


async def test_failing_liveness_listener_does_not_block_the_others(reported: list[dict[str, Any]]) -> None:
    def fail(_is_alive: bool) -> None:
        raise ZeroDivisionError

    followers, heard = LivenessListeners(), list[bool]()
    followers.add(fail)
    followers.add(heard.append)
    followers.notify(is_alive=False)
    followers.notify(is_alive=True)
    assert heard == [False, True]
    assert len(reported) == 2

"""What goes on next to everything else does not end in silence."""

import asyncio
import time
from typing import Any

import pytest

from kvrouter.transports.background import LATE_S, Sweep, spawn
from kvrouter.transports.requests.leg_stream import LegStream, UnacceptedLegs
from kvrouter.transports.requests.port import LivenessListeners, WorkerUnreachable
from tests.testing.scripted_worker import leg, read_all
from tests.testing.waits import until


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


class Members:
    """Notes which members are checked, and gives each the next due time that a test wants."""

    def __init__(self) -> None:
        self.checked: list[str] = []
        self.again_s: dict[str, float] = {}

    def check(self, member: str, now_s: float, late_s: float) -> float | None:
        self.checked.append(member)
        after_s = self.again_s.pop(member, None)
        return None if after_s is None else now_s + after_s


async def test_a_sweep_checks_members_when_due_in_any_order_of_adding() -> None:
    members = Members()
    sweep: Sweep[str] = Sweep(members.check)
    now_s = time.monotonic()
    for member, after_s in (("last", 0.5), ("never", 1e6), ("first", 0.05), ("dropped", 0.1), ("again", 0.2)):
        sweep.put(member, now_s + after_s)
    sweep.drop("dropped")
    sweep.drop("unknown")
    members.again_s["again"] = 0.5
    await until(lambda: members.checked == ["first", "again", "last", "again"])
    assert time.monotonic() - now_s >= 0.7


async def test_an_earlier_due_time_moves_the_sweep_and_a_later_one_does_not() -> None:
    members = Members()
    sweep: Sweep[str] = Sweep(members.check)
    now_s = time.monotonic()
    sweep.put("moved", now_s + 1e6)
    sweep.put("moved", now_s + 0.05)
    sweep.put("later", now_s + 0.05)
    sweep.put("later", now_s + 1e6)
    await until(lambda: members.checked == ["moved"])
    sweep.put("stopped", now_s)
    sweep.stop()
    await asyncio.sleep(0.15)
    assert members.checked == ["moved"]


async def test_a_failing_check_is_reported_and_others_are_checked(reported: list[dict[str, Any]]) -> None:
    checked: list[str] = []

    def check(member: str, _now_s: float, _late_s: float) -> None:
        checked.append(member)
        sweep.drop("dropped")
        if member == "fails":
            raise ZeroDivisionError

    sweep: Sweep[str] = Sweep(check)
    for member in ("fails", "dropped", "well"):
        sweep.put(member, time.monotonic())
    await until(lambda: checked == ["fails", "well"])
    assert [type(context["exception"]) for context in reported] == [ZeroDivisionError]


@pytest.mark.parametrize("how", ["accepted", "withdrawn", "failed"])
async def test_a_withheld_cancel_is_sent_once(how: str) -> None:
    cancelled: list[str] = []
    stream = LegStream("w", leg(), on_read=lambda _: None, on_cancel=cancelled.append)
    stream.cancel("its client left")
    assert cancelled == []
    if how == "accepted":
        stream.accept()
    if how == "failed":
        stream.break_off("the worker was lost")
    for _ in range(2):
        stream.withdraw(WorkerUnreachable("w did not answer"))
    assert cancelled == ([] if how == "failed" else ["its client left"])


async def test_a_blocked_loop_does_not_count_as_a_worker_that_does_not_accept() -> None:
    cancelled: list[str] = []
    stream = LegStream("w", leg(), on_read=lambda _: None, on_cancel=cancelled.append)
    unaccepted = UnacceptedLegs(0.05)
    unaccepted.add(stream, time.monotonic())
    time.sleep(0.05 + 2 * LATE_S)  # noqa: ASYNC251
    await asyncio.sleep(0.05)
    assert cancelled == []
    with pytest.raises(WorkerUnreachable, match=r"w did not answer in 0.05 s"):
        await read_all(stream)
    assert cancelled == ["w did not answer in 0.05 s"]

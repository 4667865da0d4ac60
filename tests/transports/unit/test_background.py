"""What goes on next to everything else does not end in silence."""

import asyncio
import time
import weakref
from typing import Any

import pytest
from msgspec.structs import replace

from kvrouter.transports.background import LATE_S, DueTimes, spawn
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


async def test_members_are_checked_in_the_order_of_their_due_times() -> None:
    members = Members()
    due_times: DueTimes[str] = DueTimes(members.check)
    now_s = time.monotonic()
    for member, after_s in (("last", 0.5), ("never", 1e6), ("first", 0.05), ("dropped", 0.1), ("again", 0.2)):
        due_times.put(member, now_s + after_s)
    due_times.drop("dropped")
    due_times.drop("unknown")
    members.again_s["again"] = 0.5
    await until(lambda: members.checked == ["first", "again", "last", "again"])
    assert time.monotonic() - now_s >= 0.7


async def test_an_earlier_due_time_moves_the_check_and_a_later_one_delays_it() -> None:
    members = Members()
    due_times: DueTimes[str] = DueTimes(members.check)
    now_s = time.monotonic()
    due_times.put("moved", now_s + 1e6)
    due_times.put("moved", now_s + 0.05)
    due_times.put("later", now_s + 0.05)
    due_times.put("later", now_s + 1e6)
    await until(lambda: members.checked == ["moved"])
    due_times.put("next", now_s)
    await until(lambda: members.checked == ["moved", "next"])


async def test_a_due_time_in_the_past_is_checked_first_and_not_as_late() -> None:
    lateness_s: dict[str, float] = {}

    def check(member: str, _now_s: float, late_s: float) -> None:
        lateness_s[member] = late_s

    due_times: DueTimes[str] = DueTimes(check)
    due_times.put("due", time.monotonic())
    due_times.put("overdue", time.monotonic() - 1e6)
    await until(lambda: list(lateness_s) == ["overdue", "due"])
    assert max(lateness_s.values()) < 1e3


async def test_a_failing_check_is_reported_and_others_are_checked(reported: list[dict[str, Any]]) -> None:
    checked: list[str] = []

    def check(member: str, _now_s: float, _late_s: float) -> None:
        checked.append(member)
        due_times.drop("dropped")
        if member == "fails":
            raise ZeroDivisionError

    due_times: DueTimes[str] = DueTimes(check)
    for member in ("fails", "dropped", "well"):
        due_times.put(member, time.monotonic())
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


async def test_a_late_check_postpones_the_end_of_an_unaccepted_leg_once() -> None:
    cancelled: list[str] = []
    stream = LegStream("w", leg(), on_read=lambda _: None, on_cancel=cancelled.append)
    unaccepted = UnacceptedLegs(5.0)
    assert unaccepted.check(stream, 100.0, 2 * LATE_S) == 100.0 + 2 * LATE_S
    assert cancelled == []
    assert unaccepted.check(stream, 101.0, 2 * LATE_S) is None
    assert cancelled == ["w did not answer in 5.0 s"]
    with pytest.raises(WorkerUnreachable, match=r"w did not answer in 5.0 s"):
        await read_all(stream)


@pytest.mark.parametrize("how", ["accepted", "failed", "cancelled"])
async def test_a_leg_is_not_kept_once_its_acceptance_is_not_awaited(how: str) -> None:
    unaccepted = UnacceptedLegs(1e6)
    request = replace(leg(), kv_transfer_params=None)
    stream = LegStream("w", request, on_read=lambda _: None, on_cancel=lambda _: None)
    unaccepted.add(stream, time.monotonic())
    match how:
        case "accepted":
            stream.accept()
        case "failed":
            stream.break_off("the worker was lost")
        case _:
            stream.cancel("its client left")
    held = weakref.ref(stream)
    del stream
    assert held() is None


async def test_a_leg_whose_cancel_is_withheld_is_withdrawn_at_the_limit() -> None:
    cancelled: list[str] = []
    stream = LegStream("w", leg(), on_read=lambda _: None, on_cancel=cancelled.append)
    UnacceptedLegs(0.05).add(stream, time.monotonic())
    stream.cancel("its client left")
    await until(lambda: cancelled == ["its client left"])

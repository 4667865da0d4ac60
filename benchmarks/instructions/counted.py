"""``python -m benchmarks.instructions.counted FD frontend …``: the process that is counted, and nothing else.

``frontend`` and what follows is a command line of kvrouter, which runs on an event loop whose timers can be
put off; ``decisions`` is a router without sockets that is told what to decide. FD is a socket over which the
counting process says what to do. Each mark is a call of getsid, which callgrind and ptrace see.
"""

import asyncio
import gc
import itertools
import json
import os
import socket
import sys
import threading
from collections.abc import Callable
from contextvars import Context
from functools import partial
from types import FrameType

import uvloop

from benchmarks.instructions.protocol import COUNT_CALLS, PUT_OFF_S, Reply
from benchmarks.measure import settle
from benchmarks.ours.decision import Deciding
from kvrouter.cli import main as run_command
from kvrouter.config import KvRouterConfig

BLOCKS_HELD = 16_384
"""Of other prompts, in the index: enough that it is not empty, and soon published."""


class Marks:
    """Marks where one count ends and the next begins, and counts the calls of Python functions."""

    def __init__(self) -> None:
        self._n_marks = 0
        self._calls = itertools.count()
        self._read = -1
        if os.environ.get(COUNT_CALLS):
            sys.setprofile(self._profile)
            threading.setprofile(self._profile)

    def mark(self) -> Reply:
        """End a count."""
        os.getsid(0)
        self._n_marks += 1
        before, self._read = self._read, next(self._calls)
        # Reading the counter moved it on, as a call does.
        return Reply(pid=os.getpid(), marks=self._n_marks, calls=self._read - before - 1)

    def _profile(self, _frame: FrameType, event: str, _argument: object) -> None:
        if event == "call":
            next(self._calls)


class Loop(uvloop.Loop):
    """An event loop whose timers do not come once they are put off, so that requests alone are counted."""

    put_off_s = 0.0

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: object, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return super().call_later(delay + self.put_off_s, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., object], *args: object, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return super().call_at(when + self.put_off_s, callback, *args, context=context)


class Told:
    """Does what the counting process says while the event loop runs something else."""

    def __init__(self, loop: Loop, wire: socket.socket, marks: Marks) -> None:
        self._loop = loop
        self._wire = wire
        self._marks = marks
        loop.add_reader(wire.fileno(), self._do)

    def _do(self) -> None:
        match self._wire.recv(1):
            case b"":
                self._loop.remove_reader(self._wire.fileno())
            case b"q":  # no timer and no collection from here on
                self._loop.put_off_s = PUT_OFF_S
                settle()
                gc.disable()
                _say(self._wire, self._marks.mark())
            case b"m":
                _say(self._wire, self._marks.mark())


def frontend(wire: socket.socket, marks: Marks, arguments: list[str]) -> None:
    """Run kvrouter's command line on a loop that is told what to do."""

    def new_loop() -> Loop:
        loop = Loop()
        Told(loop, wire, marks)
        return loop

    uvloop.run = partial(uvloop.run, loop_factory=new_loop)
    sys.argv = ["kvrouter", *arguments]
    run_command()


async def decisions(wire: socket.socket, marks: Marks) -> None:
    """Decide as often as is said, with what is said: ``{"n_workers", "cost", "prepare" or "decide"}``."""
    bench: Deciding | None = None
    number = 0
    with wire.makefile("rb") as lines:
        for line in lines:
            asked = json.loads(line)
            if "prepare" in asked:
                gc.enable()
                if bench is not None:
                    await bench.close()
                config = KvRouterConfig(router_cost=asked["cost"])
                bench = Deciding({"n_workers": asked["prepare"], "blocks_held": BLOCKS_HELD}, config)
                await bench.prepare()
                gc.disable()
                _say(wire, marks.mark())
                continue
            if bench is None:
                raise ValueError(f"nothing is prepared: {asked}")
            requests = [bench.request(each) for each in range(number, number + asked["decide"])]
            number += asked["decide"]
            marks.mark()
            for request in requests:
                await bench.place_and_release(request)
            _say(wire, marks.mark())


def _say(wire: socket.socket, reply: Reply) -> None:
    wire.sendall(json.dumps(reply).encode() + b"\n")


def main() -> None:
    """Be what the command line says."""
    wire = socket.socket(fileno=int(sys.argv[1]))
    marks = Marks()
    if sys.argv[2] == "decisions":
        uvloop.run(decisions(wire, marks))
    else:
        frontend(wire, marks, sys.argv[2:])


if __name__ == "__main__":
    main()

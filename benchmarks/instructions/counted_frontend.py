"""``python -m benchmarks.instructions.counted_frontend FD frontend …``: kvrouter's command line, counted.

It runs on an event loop whose timers can be put off. FD is a socket over which the counting process says what
to do.
"""

import asyncio
import gc
import socket
import sys
from collections.abc import Callable
from contextvars import Context
from functools import partial

from benchmarks.instructions.marks import PUT_OFF_S, Marks, say, step_clocks

step_clocks()

import uvloop  # noqa: E402

from benchmarks.measure import settle  # noqa: E402
from kvrouter.cli import main as run_command  # noqa: E402


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
                say(self._wire, self._marks.mark())
            case b"m":
                say(self._wire, self._marks.mark())


def frontend(wire: socket.socket, marks: Marks, arguments: list[str]) -> None:
    """Run kvrouter's command line on a loop that is told what to do."""

    def new_loop() -> Loop:
        loop = Loop()
        Told(loop, wire, marks)
        return loop

    uvloop.run = partial(uvloop.run, loop_factory=new_loop)
    sys.argv = ["kvrouter", *arguments]
    run_command()


def main() -> None:
    """Be a frontend."""
    frontend(socket.socket(fileno=int(sys.argv[1])), Marks(), sys.argv[2:])


if __name__ == "__main__":
    main()

"""Marks in the counted process, between which is counted. Nothing of kvrouter is imported here."""

import itertools
import json
import os
import socket
import sys
import threading
import time
from types import FrameType
from typing import TypedDict

COUNT_CALLS = "BENCH_COUNT_CALLS"
"""The variable by which the counted process is told to count calls of Python functions."""

DYNAMO = "dynamo"
"""The cost by which Dynamo's own selector decides."""

CLOCK_STEP_S = 1e-4
"""What reading a clock moves it on by."""

PUT_OFF_S = 3600.0
"""Longer than any count takes."""


class Reply(TypedDict):
    """What the counted process answers at a mark."""

    pid: int

    marks: int
    """So far."""

    calls: int
    """Of Python functions since the mark before."""


def step_clocks() -> None:
    """Let clocks move on by steps and not with time; modules that take hold of them are imported later.

    Else what is done once a second, as reading learned speeds again, came as often as a machine is slow.
    A clock stays a function of C, so that no call of a Python function is added.
    """
    time.monotonic = itertools.count(time.monotonic(), CLOCK_STEP_S).__next__
    time.time = itertools.count(time.time(), CLOCK_STEP_S).__next__


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
        """End a count, by a call that callgrind and ptrace see."""
        os.getsid(0)
        self._n_marks += 1
        before, self._read = self._read, next(self._calls)
        # Reading the counter moved it on, as a call does.
        return Reply(pid=os.getpid(), marks=self._n_marks, calls=self._read - before - 1)

    def _profile(self, _frame: FrameType, event: str, _argument: object) -> None:
        if event == "call":
            next(self._calls)


def say(wire: socket.socket, reply: Reply) -> None:
    """Answer the counting process."""
    wire.sendall(json.dumps(reply).encode() + b"\n")

"""Marks in the counted process, between which is counted. Nothing of kvrouter is imported here."""

import itertools
import json
import os
import socket
import sys
import threading
from types import FrameType
from typing import TypedDict

COUNT_CALLS = "BENCH_COUNT_CALLS"
"""The variable by which the counted process is told to count calls of Python functions."""

DYNAMO = "dynamo"
"""The cost by which Dynamo's own selector decides."""

PUT_OFF_S = 3600.0
"""Longer than any count takes."""


class Reply(TypedDict):
    """What the counted process answers at a mark."""

    pid: int

    marks: int
    """So far."""

    calls: int
    """Of Python functions since the mark before."""


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

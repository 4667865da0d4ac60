"""What asyncio opens while a test runs: sockets and child processes, until each of them has ended.

A transport that nobody closes is found by the garbage collector, in whatever test that happens, or after the
last one. So whoever opened it is reported here, at the end of its own test.
"""

import asyncio
import traceback
from asyncio import base_subprocess, selector_events
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

from tests.testing.processes import eventually

ENDED_WITHIN_S = 60.0
"""Longer than asyncio waits for the other side's last word of TLS."""

FRAMES = 12
"""So many of the calls that opened a transport are reported."""

_CLASSES: tuple[Any, ...] = (
    selector_events._SelectorTransport,  # type: ignore[attr-defined]
    base_subprocess.BaseSubprocessTransport,
)


class OpenTransports:
    """Those that were opened, each with the calls that did so."""

    def __init__(self) -> None:
        self._opened: WeakKeyDictionary[Any, traceback.StackSummary] = WeakKeyDictionary()

    def add(self, transport: Any) -> None:
        """Take note of a new one."""
        self._opened[transport] = traceback.extract_stack(limit=FRAMES)

    def left(self) -> list[str]:
        """Return what has not ended, and where it was opened."""
        return [
            f"{transport!r}, opened by\n{''.join(calls.format())}"
            for transport, calls in list(self._opened.items())
            if not _has_ended(transport)
        ]

    async def until_ended(self, *, limit_s: float = ENDED_WITHIN_S) -> None:
        """Return once all have ended. Raises AssertionError that names those that do not."""

        async def have_ended() -> bool:
            return not self.left()

        try:
            await eventually(have_ended, limit_s=limit_s)
        except AssertionError as error:
            raise AssertionError("\n".join(["left open:", *self.left()])) from error


@contextmanager
def track_transports() -> Iterator[OpenTransports]:
    """Take note of every transport that asyncio opens in this process meanwhile."""
    transports = OpenTransports()
    with ExitStack() as stack:
        for each in _CLASSES:
            stack.enter_context(patch.object(each, "__init__", _noting(each, transports)))
        yield transports


def _noting(of: Any, transports: OpenTransports) -> Any:
    begin = of.__init__

    @wraps(begin)
    def init(self: Any, *arguments: Any, **named: Any) -> None:
        try:
            begin(self, *arguments, **named)
        finally:  # one that fails once it has its socket is left open too
            transports.add(self)

    return init


def _has_ended(transport: Any) -> bool:
    """A socket is closed after its protocol heard of it; a process is let go once it and its pipes ended."""
    if isinstance(transport, asyncio.SubprocessTransport):
        return transport._proc is None  # type: ignore[attr-defined]
    return transport._sock is None

"""Cancels work at each of its awaits in turn, so that no moment in between depends on the clock."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from itertools import count
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class _CancelledAt(Generic[T]):
    """Awaits ``work``; at its suspension number ``n`` it is cancelled instead of suspended."""

    def __init__(self, work: Coroutine[Any, Any, T], n: int) -> None:
        self._work = work
        self._n = n
        self.is_cancelled = False

    def __await__(self) -> Generator[Any, Any, T]:
        try:
            for at in count():
                waits_for = self._work.send(None)
                if at == self._n:
                    self.is_cancelled = True
                    waits_for = self._work.throw(asyncio.CancelledError)
                yield waits_for
        except StopIteration as end:
            result: T = end.value
            return result
        raise AssertionError


async def cancelled_at_each_await(
    begin: Callable[[], Coroutine[Any, Any, T]], *, at_most: int = 200
) -> AsyncIterator[T | None]:
    """Begin the work again and again, cancelled one await later each time, until it ends before that.

    Yields each result: None of work that was cancelled, and has not gone on regardless.
    """
    for n in range(at_most):
        work = _CancelledAt(begin(), n)
        try:
            yield await work
        except asyncio.CancelledError:
            yield None
        if not work.is_cancelled:
            return
    raise AssertionError(f"it has more than {at_most} awaits")

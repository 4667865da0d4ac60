"""Functions and methods of the product whose calls one test watches, or makes fail."""

import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import pytest


class Call(NamedTuple):
    """One call of a function that is watched."""

    arguments: tuple[object, ...]
    named: Mapping[str, object]
    thread: str


class WatchCalls(Protocol):
    """``calls = watch_calls(module, "name")``."""

    def __call__(self, owner: object, name: str) -> Sequence[Call]: ...


class MakeFail(Protocol):
    """``calls = make_fail(module, "name", OSError("why"))``: each call, or ``at_call`` alone, from 0."""

    def __call__(
        self, owner: object, name: str, error: BaseException, *, at_call: int | None = None
    ) -> Sequence[Call]: ...


@pytest.fixture
def watch_calls(monkeypatch: pytest.MonkeyPatch) -> WatchCalls:
    """Note the calls of a function, or of a class's method, until the test ends; they work as ever."""

    def watch(owner: object, name: str) -> Sequence[Call]:
        return _noted(monkeypatch, owner, name, None, None)

    return watch


@pytest.fixture
def make_fail(monkeypatch: pytest.MonkeyPatch) -> MakeFail:
    """Let a function, or a class's method, raise an error until the test ends."""

    def fail(owner: object, name: str, error: BaseException, *, at_call: int | None = None) -> Sequence[Call]:
        return _noted(monkeypatch, owner, name, error, at_call)

    return fail


def _noted(
    monkeypatch: pytest.MonkeyPatch,
    owner: object,
    name: str,
    error: BaseException | None,
    at_call: int | None,
) -> Sequence[Call]:
    calls: list[Call] = []
    original = getattr(owner, name)

    def noted(*arguments: object, **named: object) -> object:
        calls.append(Call(arguments, named, threading.current_thread().name))
        if error is not None and at_call in (None, len(calls) - 1):
            raise error
        return original(*arguments, **named)

    monkeypatch.setattr(owner, name, noted)
    return calls

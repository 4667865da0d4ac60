"""What a process does with its memory once it is ready."""

import gc
from queue import SimpleQueue
from threading import Event, Thread, current_thread

import pytest

from kvrouter.app import lifetime


def test_memory_moves_to_huge_pages_while_the_process_serves_or_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    serves, moving = Event(), SimpleQueue[Thread]()

    def move() -> None:
        serves.wait()
        moving.put(current_thread())

    monkeypatch.setattr(lifetime, "use_huge_pages", move)
    lifetime.settle_memory()
    gc.unfreeze()
    serves.set()
    assert moving.get().daemon

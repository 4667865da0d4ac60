"""What a process does with its memory once it is ready."""

import asyncio
import gc

import pytest

from kvrouter.app import lifetime


async def test_memory_moves_to_huge_pages_at_the_start_and_once_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, moves, moved_again = asyncio.get_running_loop(), list[None](), asyncio.Event()

    def move() -> None:
        moves.append(None)
        if len(moves) == 2:
            loop.call_soon_threadsafe(moved_again.set)

    monkeypatch.setattr(lifetime, "use_huge_pages", move)
    monkeypatch.setattr(lifetime, "WARM_S", 0.0)
    lifetime.settle_memory()
    gc.unfreeze()
    assert len(moves) == 1
    await moved_again.wait()

"""Predicted blocks whose time is over give their memory back, while no request comes."""

from collections.abc import Callable

import pytest

from kvrouter.core.hashing import Prompt
from kvrouter.core.ids import Slot
from kvrouter.kernel.index import ApproximateIndex
from kvrouter.kernel.placement.cache_view import PredictedCacheView
from kvrouter.router import router_service
from kvrouter.router.event_cache_view import EventCacheView
from kvrouter.router.model_router import ModelRouter
from kvrouter.settings.router_settings import KvRouterConfig
from tests.testing.constants import SetConstants
from tests.testing.router_harness import RouterHarness, card
from tests.testing.scripted_transport import ScriptedTransport
from tests.testing.waits import until

PIECE = 4096


def predicted(model: ModelRouter) -> ApproximateIndex:
    if isinstance(model.cache, EventCacheView):
        return model.cache.predicted
    assert isinstance(model.cache, PredictedCacheView)
    return model.cache.index


def fill(model: ModelRouter, n_blocks: int) -> None:
    """Predict so many blocks for slot 0."""
    predicted(model).touch(Slot(0), Prompt(list(range(n_blocks)), block_size=1), model.clock())


@pytest.fixture
async def make(set_constants: SetConstants) -> Callable[..., RouterHarness]:
    set_constants(router_service, EXPIRE_EVERY_S=0.01)

    def harness(*, kv_events: bool) -> RouterHarness:
        return RouterHarness(ScriptedTransport(None), KvRouterConfig(kv_events=kv_events, router_ttl_s=0.05))

    return harness


@pytest.mark.parametrize("kv_events", [False, True])
async def test_expired_blocks_go_away_without_a_request(
    make: Callable[..., RouterHarness], kv_events: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make(kv_events=kv_events)
    await harness.start()
    harness.discovery.put(card(1))
    index = predicted(harness.model)
    sizes = [2 * PIECE + 10]
    expire = harness.model.cache.expire

    def counted(now_s: float) -> None:
        expire(now_s)
        sizes.append(index.stats().blocks)

    monkeypatch.setattr(harness.model.cache, "expire", counted)
    fill(harness.model, sizes[0])
    await until(lambda: sizes[-1] == 0)
    assert sorted(set(sizes)) == [0, 10, PIECE + 10, 2 * PIECE + 10], "a piece of them at a time"
    assert index.stats().bytes < 1024
    harness.service.stop()


async def test_a_stopped_router_expires_no_blocks(make: Callable[..., RouterHarness]) -> None:
    stopped, running = make(kv_events=False), make(kv_events=False)
    for harness in (stopped, running):
        await harness.start()
        harness.discovery.put(card(1))
    fill(stopped.model, 10)
    stopped.service.stop()
    fill(running.model, 3 * PIECE)
    await until(lambda: predicted(running.model).stats().blocks == 0)
    assert predicted(stopped.model).stats().blocks == 10
    running.service.stop()

"""What every discovery promises whose store is outside of the processes that use it."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvrouter.planes.discovery.port import Gone
from tests.support.discovery_stores import LEASE_S, STORES, Store, card, listen
from tests.support.nats_server import NatsServer


@pytest.fixture(params=[name for name in STORES if name != "memory"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    server: NatsServer | None = request.getfixturevalue("own_nats") if request.param == "nats" else None
    async with STORES[request.param](tmp_path, server) as made:
        yield made


async def test_only_who_does_not_renew_expires_and_may_come_back(store: Store) -> None:
    lives, dies = store.end(), store.end()
    await lives.publish(card(1))
    await dies.publish(card(2))
    ear = await listen(store.end())
    await dies.close()
    await ear.until_heard(card(1), card(2), (2, 9, Gone.EXPIRED))
    await store.end().publish(card(2))
    await ear.until_heard(card(1), card(2), (2, 9, Gone.EXPIRED), card(2))


async def test_one_that_expired_and_starts_anew_is_replaced(store: Store) -> None:
    dies = store.end()
    await dies.publish(card(2))
    ear = await listen(store.end())
    await dies.close()
    await ear.until_heard(card(2), (2, 9, Gone.EXPIRED))
    await store.end().publish(card(2, 10))
    await ear.until(lambda: card(2, 10) in ear.heard)
    assert set(ear.losses[1:]) <= {(2, 9, Gone.REPLACED)}


async def test_nobody_vanishes_while_the_store_is_lost(store: Store) -> None:
    lives, dies = store.end(), store.end()
    await lives.publish(card(1))
    await dies.publish(card(2))
    ear = await listen(store.end())
    await store.lose()
    await ear.until_heard(card(1), card(2), False)
    await dies.close()
    await asyncio.sleep(1.5 * LEASE_S)
    await ear.until_heard(card(1), card(2), False)
    await store.bring_back(is_empty=False)
    await ear.until_heard(card(1), card(2), False, True, (2, 9, Gone.EXPIRED))
    late = await listen(store.end())
    assert card(1) in late.heard


async def test_a_store_that_comes_back_empty_is_filled_by_the_workers(store: Store) -> None:
    lives = store.end()
    await lives.publish(card(1))
    await lives.publish(card(2))
    ear = await listen(store.end())
    await store.lose()
    await ear.until_heard(card(1), card(2), False)
    await store.bring_back(is_empty=True)
    await ear.until_heard(card(1), card(2), False, True)
    late = await listen(store.end())
    await late.until(lambda: card(1) in late.heard and card(2) in late.heard)
    await lives.publish(card(3))
    await ear.until_heard(card(1), card(2), False, True, card(3))

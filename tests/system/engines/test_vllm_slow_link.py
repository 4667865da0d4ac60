"""Real vLLM engines, and a link between them that tc makes slow: the router learns it, and shifts traffic."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from tests.system.engines.slow_link import (
    BYTES_PER_MBIT,
    FAR,
    FAR_LINK,
    PATIENT,
    REQUESTS,
    SLOW_MBIT,
    STATIONS,
    Learned,
    attach,
    learn,
    slow_link,
)
from tests.testing.processes import fleet


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def learned(engine_folder: Path) -> AsyncIterator[Learned]:
    """The engines are gone when the tests look at what was learned."""
    async with slow_link(engine_folder) as here, fleet(PATIENT) as kvrouter:
        await attach(here, kvrouter)
        found = await learn(here, kvrouter)
    yield found


async def test_every_request_is_answered_in_every_link_phase(learned: Learned) -> None:
    for phase in (learned.well, learned.slow, learned.well_again):
        assert (phase.answered, phase.errors) == (REQUESTS, [])


async def test_healthy_links_share_the_traffic(learned: Learned) -> None:
    assert 0.25 <= learned.well.far_share <= 0.75


async def test_a_slow_link_is_reported_and_gets_little_traffic(learned: Learned) -> None:
    assert any(" link_slow " in line and FAR_LINK in line for line in learned.log), learned.log
    assert learned.slow_metric == 1.0, learned.log
    assert learned.slow.far_share_second_half <= 0.15, learned.slow


async def test_the_learned_rate_of_a_slow_link_is_near_its_real_rate(learned: Learned) -> None:
    """The engine counts the seconds of transfers that share the link for each of them."""
    rate = SLOW_MBIT * BYTES_PER_MBIT
    (link,) = (each for each in learned.slow.learned if each["link"] == FAR_LINK)
    assert 0.4 <= link["bandwidth_bytes_per_s"] / rate <= 2.0
    counted = learned.slow.engine_bytes_per_s[STATIONS[FAR]]
    assert counted is not None
    assert 0.3 <= counted / rate <= 1.5


async def test_a_recovered_link_is_retried_and_regains_traffic(learned: Learned) -> None:
    assert learned.tried_again_after_s is not None
    assert learned.well_after_s is not None, learned.log
    assert learned.well_again.far_share_second_half >= 0.25

"""The bench of several routers before one fleet: its clock, and an outcome that follows from the seed."""

import asyncio

from benchmarks.herd import LOADS, RATIO_UNIT, lines_of
from benchmarks.herd_fleet import JumpingLoop, Outcome, run_fleet


def run(n_routers: int, *, syncs: bool) -> Outcome:
    loop = JumpingLoop()
    try:
        return loop.run_until_complete(
            run_fleet(
                LOADS[0].arrivals(1)[:200],
                n_routers=n_routers,
                n_workers=4,
                sync_delay_s=(0.001, 0.005) if syncs else None,
                warm_s=0.2,
                sample_s=0.05,
                seed=1,
            )
        )
    finally:
        loop.close()


def test_the_jumping_clock_keeps_the_order_of_timers() -> None:
    loop = JumpingLoop()
    rang: list[tuple[str, float]] = []

    def ring(name: str) -> None:
        rang.append((name, loop.time()))

    async def wait() -> None:
        for name, after_s in (("late", 3_600.0), ("soon", 1.0)):
            loop.call_later(after_s, ring, name)
        await asyncio.sleep(86_400.0)

    loop.run_until_complete(wait())
    loop.close()
    assert rang == [("soon", 1.0), ("late", 3_600.0)]


def test_the_same_seed_gives_the_same_outcome() -> None:
    assert run(3, syncs=True) == run(3, syncs=True)


def test_several_routers_load_ratio_is_compared_with_one_routers() -> None:
    one, several = run(1, syncs=False), run(3, syncs=True)
    assert min(one.busiest_over_mean + several.busiest_over_mean) >= 1.0
    ratio, latency = lines_of(LOADS[0], "3 routers, with sync", [several], [one])
    assert (ratio.unit, ratio.wanted_ratio, latency.wanted_ratio) == (RATIO_UNIT, 1.1, None)
    assert ratio.theirs is not None
    assert ratio.theirs.samples == len(one.busiest_over_mean)

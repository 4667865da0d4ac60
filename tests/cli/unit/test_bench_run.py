"""Which rounds ``kvrouter bench`` counts, and what it does where an engine does not answer from here."""

from collections.abc import Callable

import pytest

from kvrouter.cli.bench import run
from kvrouter.cli.bench.arms import BenchedFleet, arms_of
from kvrouter.cli.bench.flags import BenchOptions
from kvrouter.cli.bench.run import Bench, BenchFailed
from kvrouter.cli.bench.workload import Caches
from kvrouter.cli.progress import Progress
from tests.testing.constants import SetConstants
from tests.testing.timed_engine import MODEL, Fault, TimedEngine, timed_engine

CLOCK_SPEED = 0.002
"""Of the engine's virtual time: what is left of a second after a round is waited for."""


class CalledProgress(Progress):
    """Calls ``on_show`` with each step."""

    def __init__(self, on_show: Callable[[str], None]) -> None:
        super().__init__("", None)
        self._on_show = on_show

    def show(self, text: str | None = None, *, done: float | None = None) -> None:
        super().show(text, done=done)
        self._on_show(self.text)


def bench_of(
    engine: TimedEngine,
    silent_from: str,
    *,
    engine_urls: tuple[str, ...] = (),
    in_round_1: Callable[[], None] = lambda: None,
) -> Bench:
    """A bench before an engine that answers nothing from a step on."""
    fleet = BenchedFleet(
        model=MODEL,
        engines=1,
        caches=Caches(1, 3_000, 4_096, 16),
        concurrency=1,
        engine_urls=engine_urls,
        why_through="it has no engines",
        is_separate=False,
        running_requests=0,
        is_by_load=False,
        notes=(),
    )
    options = BenchOptions(url=engine.url, seconds=1.0)

    def on_show(text: str) -> None:
        if text.startswith(silent_from):
            engine.fault = Fault.SILENT
        if text.startswith("round 1, "):
            in_round_1()

    def clock() -> float:
        return CLOCK_SPEED * engine.clock()

    arms = arms_of(fleet, options, engine.url, {}, None)
    return Bench(options, fleet, arms, CalledProgress(on_show), clock)


async def test_a_round_that_is_stopped_is_not_counted_and_said(set_constants: SetConstants) -> None:
    def end_soon() -> None:
        set_constants(run, OVERRUN=0.0, OVERRUN_S=0.3)

    async with timed_engine(TimedEngine()) as engine:
        bench = bench_of(engine, "round 2", in_round_1=end_soon)
        await bench.run()
    assert len(bench.found[0].rounds) == 1
    (note,) = bench.notes
    assert note.startswith("round 2 was stopped after ")
    assert "is not counted" in note


async def test_a_first_round_that_is_stopped_is_an_error(set_constants: SetConstants) -> None:
    set_constants(run, OVERRUN=1.0, OVERRUN_S=0.0)
    async with timed_engine(TimedEngine()) as engine:
        with pytest.raises(BenchFailed, match=r"--seconds: round 1 was stopped after "):
            await bench_of(engine, "round 1").run()


async def test_the_router_does_round_robin_where_an_engine_does_not_answer() -> None:
    async with timed_engine(TimedEngine()) as engine:
        bench = bench_of(engine, "no step", engine_urls=("http://127.0.0.1:1",))
        await bench.run()
    assert "in its mode round-robin, because http://127.0.0.1:1/v1/completions: " in bench.found[1].via
    assert not any(failure for arm in bench.found for each in arm.rounds for failure in each.failures)

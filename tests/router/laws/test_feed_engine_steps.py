"""The law of the engine's cache, when whatever can happen comes between two steps of the index's work."""

from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st

from kvrouter.engines.mock_engine.config import EngineHashing
from kvrouter.router import feed_commands, index_work
from tests.router.laws.test_feed_engine_law import STEPS, run
from tests.testing.virtual_time import run_in_virtual_time


@settings(max_examples=max(100, settings().max_examples))
@given(STEPS, st.integers(0, 2**32), st.sampled_from([1, 3]))
def test_router_index_in_small_steps_converges_to_the_engines_cache(
    steps: list[str], seed: int, step: int
) -> None:
    with (
        patch.object(index_work, "STEP_BLOCKS", step),
        patch.object(index_work, "STEP_EVENTS", step),
        patch.object(feed_commands, "STEP_EVENTS", step),
    ):
        run_in_virtual_time(run(steps, seed, EngineHashing.OPAQUE))

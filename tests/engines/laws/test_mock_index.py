"""What a router's index believes after an engine's events is what the engine then finds in its own cache."""

from array import array

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvrouter._native import BlockIndex
from kvrouter.core.hashing import Prompt
from kvrouter.core.ids import DpRank, Slot, WorkerId
from kvrouter.engines.mock_engine.config import EngineHashing, MockConfig
from kvrouter.engines.mock_engine.engine import MockEngine
from kvrouter.kernel.index import Applied
from tests.oracles.index import NaiveBlockIndex
from tests.testing.engine_requests import plain_leg

BLOCK_SIZE = 4
PROMPTS = st.lists(
    st.builds(
        lambda stem, length, tail: [stem] * length + tail,
        st.integers(0, 3),
        st.integers(1, 20),
        st.lists(st.integers(0, 2), max_size=6),
    ),
    min_size=1,
    max_size=25,
)


def counts(applied: Applied) -> tuple[int, ...]:
    return (applied.stored, applied.removed, applied.orphaned, applied.unknown_removed, applied.repeated)


@given(prompts=PROMPTS, hashing=st.sampled_from(EngineHashing), total_kv_blocks=st.integers(9, 30))
def test_overlap_equals_the_cached_tokens_that_the_engine_reports(
    prompts: list[list[int]], hashing: EngineHashing, total_kv_blocks: int
) -> None:
    config = MockConfig(
        block_size=BLOCK_SIZE, total_kv_blocks=total_kv_blocks, engine_hashing=hashing, seed=3
    )
    engine = MockEngine(config, worker_id=WorkerId(1), engine_id="mock-1")
    index, of_native_events = NaiveBlockIndex(), BlockIndex()
    overlap = np.zeros(1, dtype=np.uint32)
    now = 0.0
    for number, prompt in enumerate(prompts):
        tokens = array("I", prompt)
        index.overlap(Prompt(tokens, block_size=BLOCK_SIZE), overlap)
        # The last token is computed in any case, so a block that ends with it is not counted as cached.
        expected = min(int(overlap[0]), (len(prompt) - 1) // BLOCK_SIZE) * BLOCK_SIZE
        engine.submit(now, plain_leg(f"r{number}", tokens, max_tokens=6))
        now += 100.0
        engine.advance(now)
        outputs = engine.take_outputs()
        assert [chunk.cached_tokens for _, chunk in outputs.chunks] == [expected]
        for _, events in outputs.events:
            applied = index.apply(Slot(0), tuple(events))
            assert counts(of_native_events.apply(Slot(0), events)) == counts(applied)
            assert (applied.orphaned, applied.unknown_removed, applied.repeated) == (0, 0, 0)
    assert of_native_events.dump(Slot(0)) == index.dump(Slot(0))
    held = sum(event.n_blocks for event in engine.snapshot(DpRank(0)))
    assert held == index.held(Slot(0))

"""Where an engine's hashes cover the tokens behind a block too, no block is promised that it does not find.

The engine's rules are those of vLLM 0.33 with a drafter such as EAGLE, as its notes tell them; the frames are
made up. Blocks go in the order of an engine's eviction: none before those that follow it.
"""

from hashlib import sha256

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.core.hashing import Prompt
from kvrouter.core.ids import ModelName, Slot
from kvrouter.core.workers import WorkerCard
from kvrouter.engines.kv_events.engine_events import EngineTraits
from kvrouter.engines.kv_events.rank_blocks import RankBlocks
from kvrouter.engines.vllm.events import decode
from kvrouter.kernel.fleet.fleet import Fleet
from kvrouter.kernel.index import NativeBlockIndex
from tests.testing.router_harness import card

BLOCK = 4


class Engine:
    """Blocks by their tokens and those behind them."""

    def __init__(self, lookahead: int) -> None:
        self._lookahead = lookahead
        self._held: dict[int, int | None] = {}

    def _names(self, tokens: list[int]) -> list[int]:
        n_blocks = max(0, len(tokens) - self._lookahead) // BLOCK
        ends = [(at + 1) * BLOCK + self._lookahead for at in range(n_blocks)]
        return [int.from_bytes(sha256(bytes(tokens[:end])).digest()[:7], "big") for end in ends]

    def serve(self, tokens: list[int]) -> list[dict[str, object]]:
        """Store what is new of a prompt; return the events."""
        events: list[dict[str, object]] = []
        parent: int | None = None
        for at, name in enumerate(self._names(tokens)):
            begin, end = at * BLOCK, (at + 1) * BLOCK
            if name not in self._held:
                self._held[name] = parent
                events.append(
                    {
                        "type": "BlockStored",
                        "block_hashes": [name],
                        "parent_block_hash": parent,
                        "token_ids": tokens[begin:end],
                        "block_size": BLOCK,
                        "lora_id": None,
                        "medium": "GPU",
                        "lora_name": None,
                        "lookahead_token_ids": [tokens[end : end + self._lookahead]],
                    }
                )
            parent = name
        return events

    def evict(self, choice: int) -> list[dict[str, object]]:
        """Remove a block that none follows."""
        leaves = sorted(self._held.keys() - {*self._held.values()})
        if not leaves:
            return []
        name = leaves[choice % len(leaves)]
        del self._held[name]
        return [{"type": "BlockRemoved", "block_hashes": [name], "medium": "GPU"}]

    def found(self, tokens: list[int]) -> int:
        """How many blocks of a prompt it finds."""
        names = self._names(tokens)
        return next((at for at, name in enumerate(names) if name not in self._held), len(names))


STEPS = st.lists(
    st.lists(st.integers(0, 1), min_size=0, max_size=26) | st.integers(0, 100), min_size=1, max_size=14
)


@given(lookahead=st.integers(1, 6), steps=STEPS, tail=st.lists(st.integers(0, 1), max_size=9))
def test_overlap_promises_no_more_blocks_than_the_engine_finds(
    lookahead: int, steps: list[list[int] | int], tail: list[int]
) -> None:
    engine, ledger, index = Engine(lookahead), RankBlocks(EngineTraits(BLOCK)), NativeBlockIndex()
    prompts: list[list[int]] = [tail]
    for step in steps:
        events = engine.evict(step) if isinstance(step, int) else engine.serve(step)
        (batch,) = decode(msgspec.msgpack.encode({"ts": 0.0, "events": events}))
        index.apply(Slot(0), ledger.take(batch.events))
        if isinstance(step, list):
            prompts += [step, step[: len(step) // 2] + tail, step + tail]
    fleet = Fleet(ModelName("m"), BLOCK)
    known: WorkerCard = msgspec.structs.replace(
        card(1), model=ModelName("m"), block_size=BLOCK, lookahead_tokens=ledger.lookahead_tokens
    )
    fleet.join(known)
    for tokens in prompts:
        out = np.zeros(1, np.uint32)
        index.overlap(Prompt(tokens, block_size=BLOCK), out)
        unsure = 0 if fleet.unsure_blocks is None else int(fleet.unsure_blocks[0])
        promised, found = max(0, int(out[0]) - unsure), engine.found(tokens)
        assert promised <= found <= promised + unsure

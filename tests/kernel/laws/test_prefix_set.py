"""What an endless cache holds of a prompt is the longest beginning that it shares with one before it."""

from hypothesis import given
from hypothesis import strategies as st

from kvrouter.core.events import pack_hashes
from kvrouter.core.hashing import Prompt
from kvrouter.kernel.index import PrefixSet

PROMPTS = st.lists(st.lists(st.integers(1, 3), max_size=6), max_size=20)


def prompt(blocks: list[int]) -> Prompt:
    return Prompt.from_blocks(pack_hashes(blocks), isl_tokens=4 * len(blocks) + 1, block_size=4)


def shared(one: list[int], other: list[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


@given(PROMPTS)
def test_a_prefix_set_holds_the_longest_prefix_shared_with_a_past_prompt(prompts: list[list[int]]) -> None:
    held = PrefixSet(max_blocks=10_000)
    for at, blocks in enumerate(prompts):
        expected = max((shared(blocks, before) for before in prompts[:at]), default=0)
        assert held.add(prompt(blocks)) == expected


@given(PROMPTS, st.integers(0, 12))
def test_a_prefix_set_above_its_limit_gives_none_from_then_on(
    prompts: list[list[int]], blocks_max: int
) -> None:
    held = PrefixSet(max_blocks=blocks_max)
    seen: set[tuple[int, ...]] = set()
    is_over = False
    for blocks in prompts:
        seen |= {tuple(blocks[: n + 1]) for n in range(len(blocks))}
        is_over = is_over or len(seen) > blocks_max
        assert (held.add(prompt(blocks)) is None) == is_over

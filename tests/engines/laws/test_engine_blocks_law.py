"""The native core's part of engines' KV events equals a plain statement of its rules in Python."""

import random

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from kvrouter._native import EngineBlocks, engine_events, engine_names, engine_tokens
from kvrouter.core.events import Medium
from kvrouter.core.ids import EngineHash
from kvrouter.engines.kv_events.engine_events import engine_hash
from tests.oracles.engine_blocks import NaiveEngineBlocks


@given(seed=st.integers(0, 2**64 - 1), max_blocks=st.integers(1, 12))
def test_stores_copies_and_removals_equal_the_rule(seed: int, max_blocks: int) -> None:
    """By one seed: drawn piece by piece, hardly any block is stored twice or has a parent."""
    chance = random.Random(seed)
    blocks, rule = EngineBlocks(max_blocks=max_blocks), NaiveEngineBlocks(max_blocks=max_blocks)
    for _ in range(60):
        names = [EngineHash(chance.randint(1, 5)) for _ in range(chance.choice((0, 1, 1, 1, 2)))]
        medium = chance.choice((Medium.GPU, Medium.GPU, Medium.CPU))
        match chance.randrange(6):
            case 0:
                for name in names:
                    assert blocks.is_known(name) is (rule.find(name, medium) is not None)
                    assert blocks.copy(name, medium) == rule.copy(name, medium)
            case 1:
                where = chance.choice((None, medium))
                assert blocks.remove(names, where) == rule.remove(names, where)
            case _:
                tokens = [chance.choice((0, 0, 0, 1)) for _ in names]
                parent = chance.choice((None, EngineHash(chance.randint(1, 5))))
                lora_name, salt = (chance.choice((None, None, None, "a")) for _ in range(2))
                objects = chance.choice((None, None, None, [[7]] * len(names)))
                stored = (names, parent, tokens, 1, medium, lora_name, salt, objects)
                assert blocks.store(*stored) == rule.store(*stored)
        for each in Medium:
            assert blocks.held(each) == len(rule.media[each])
            assert all(blocks.is_held(name, each) for name in rule.media[each])


HASHES = st.integers(-(2**63), 2**64 - 1) | st.binary(min_size=8, max_size=64)
TOKENS = st.integers(0, 2**32 - 1)


@given(hashes=st.lists(HASHES, max_size=40))
def test_names_are_the_hashes_that_msgspec_decodes(hashes: list[int | bytes]) -> None:
    assert engine_names(msgspec.msgpack.encode(hashes), 40) == tuple(map(engine_hash, hashes))


@given(tokens=st.lists(TOKENS, max_size=40), behind=st.integers(-(2**63), 2**64 - 1))
def test_token_ids_equal_those_of_pairs(tokens: list[int], behind: int) -> None:
    for form in (tokens, [(token, behind) for token in tokens]):
        ids, texts = engine_tokens(msgspec.msgpack.encode(form), 40, False)
        assert (ids.typecode, list(ids), list(texts)) == ("I", tokens, [])


@given(tokens=st.lists(TOKENS | st.text(max_size=40), max_size=40))
def test_texts_among_token_ids_keep_their_places(tokens: list[int | str]) -> None:
    ids, texts = engine_tokens(msgspec.msgpack.encode(tokens), 40, True)
    assert list(ids) == [0 if isinstance(token, str) else token for token in tokens]
    assert list(texts) == [(at, token) for at, token in enumerate(tokens) if isinstance(token, str)]


FIELDS = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(events=st.lists(st.tuples(st.text(max_size=40), st.booleans(), FIELDS, FIELDS), max_size=20))
def test_events_are_split_where_msgspec_splits_them(
    events: list[tuple[str, bool, object, object]],
) -> None:
    encode = msgspec.msgpack.encode
    expected = [
        (kind, is_array, encode([kind, one, two] if is_array else {"a": one, "type": kind, "b": two}))
        for kind, is_array, one, two in events
    ]
    assert engine_events(encode([msgspec.Raw(raw) for _, _, raw in expected]), 20) == expected

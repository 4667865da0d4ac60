"""Salted names: the same under one salt, others under another, and nothing of what they stand for."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.core.errors import ConfigError
from kvrouter.core.events import pack_hashes, unpack_hashes
from kvrouter.core.hashing import salted_hashes
from kvrouter.recording.salt import Salt

MASK = (1 << 64) - 1
NUMBERS = st.integers(min_value=0, max_value=MASK)


def rotated(number: int, bits: int) -> int:
    return (number << bits | number >> (64 - bits)) & MASK


def scalar_siphash(number: int, key: bytes) -> int:
    """SipHash-2-4 of 8 bytes, written from its paper."""
    k0, k1 = (int.from_bytes(key[at : at + 8], "little") for at in (0, 8))
    a, b = k0 ^ 0x736F6D6570736575, k1 ^ 0x646F72616E646F6D
    c, d = k0 ^ 0x6C7967656E657261, k1 ^ 0x7465646279746573

    def rounds(times: int) -> None:
        nonlocal a, b, c, d
        for _ in range(times):
            a = a + b & MASK
            b = rotated(b, 13) ^ a
            a = rotated(a, 32)
            c = c + d & MASK
            d = rotated(d, 16) ^ c
            a = a + d & MASK
            d = rotated(d, 21) ^ a
            c = c + b & MASK
            b = rotated(b, 17) ^ c
            c = rotated(c, 32)

    for word in (number, 8 << 56):
        d ^= word
        rounds(2)
        a ^= word
    c ^= 0xFF
    rounds(4)
    return a ^ b ^ c ^ d


def test_the_published_vector_of_siphash() -> None:
    """The ninth vector of the reference implementation: the message 00 01 … 07."""
    column = salted_hashes(bytes(range(8)), bytes(range(16)))
    assert unpack_hashes(column) == (0x93F5F5799A932462,)


@given(st.lists(NUMBERS, max_size=20), st.binary(min_size=16, max_size=16))
def test_all_at_once_is_one_by_one(numbers: list[int], key: bytes) -> None:
    found = unpack_hashes(salted_hashes(pack_hashes(numbers), key))
    assert found == tuple(scalar_siphash(number, key) for number in numbers)


def test_a_key_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="key: 16 bytes, not 15"):
        salted_hashes(b"", bytes(15))


def test_one_salt_gives_one_name_and_another_salt_another() -> None:
    one, same, other = Salt(b"a" * 32), Salt(b"a" * 32), Salt(b"b" * 32)
    hashes = pack_hashes(range(9))
    assert one.blocks(hashes) == same.blocks(hashes) != other.blocks(hashes)
    assert one.blocks(hashes[8:16]) == one.blocks(hashes)[8:16]
    assert one.session("x") == same.session("x") != other.session("x")
    assert one.taint("x").removeprefix("salted:") != one.session("x")
    assert (one.id, one.id) == (same.id, Salt(b"a" * 32).id)
    assert len({one.id, other.id, Salt.drawn().id, Salt.drawn().id}) == 4


def test_a_salt_file_is_shared(tmp_path: Path) -> None:
    path = tmp_path / "salt"
    path.write_bytes(b"q" * 32)
    assert Salt.read(path).id == Salt(b"q" * 32).id


@pytest.mark.parametrize("content", [None, b"", b"q" * 31, b"q" * 4097])
def test_what_is_no_salt_file_is_refused_by_its_setting(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "salt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        Salt.read(path)
    assert caught.value.param == "salt"
    assert str(path) in caught.value.message

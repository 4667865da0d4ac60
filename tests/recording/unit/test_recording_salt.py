"""Salted names: the same under one salt, others under another, and nothing of what they stand for."""

from pathlib import Path

import pytest

from kvrouter.core.errors import ConfigError
from kvrouter.recording.salt import Salt
from tests.oracles.siphash import siphash


def test_siphash_matches_the_published_test_vector() -> None:
    """The ninth vector of the reference implementation: the message 00 01 … 07."""
    number = int.from_bytes(bytes(range(8)), "little")
    assert siphash(number, bytes(range(16))) == 0x93F5F5799A932462


def test_equal_salts_give_equal_names_and_other_salts_differ() -> None:
    one, same, other = Salt(b"a" * 32), Salt(b"a" * 32), Salt(b"b" * 32)
    assert len(one.block_key) == 16
    assert one.block_key == same.block_key != other.block_key
    assert one.session("x") == same.session("x") != other.session("x")
    assert one.taint("x").removeprefix("salted:") != one.session("x")
    assert (one.id, one.id) == (same.id, Salt(b"a" * 32).id)
    assert len({one.id, other.id, Salt.drawn().id, Salt.drawn().id}) == 4


def test_salt_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "salt"
    path.write_bytes(b"q" * 32)
    assert Salt.read(path).id == Salt(b"q" * 32).id


@pytest.mark.parametrize("content", [None, b"", b"q" * 31, b"q" * 4097])
def test_missing_or_wrongly_sized_salt_file_is_refused_by_its_setting(
    tmp_path: Path, content: bytes | None
) -> None:
    path = tmp_path / "salt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        Salt.read(path)
    assert caught.value.param == "salt"
    assert str(path) in caught.value.message

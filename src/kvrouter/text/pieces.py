"""What each token of a byte-level vocabulary stands for, in bytes and in text."""

from collections.abc import Mapping, Set
from typing import NamedTuple


def byte_alphabet() -> str:
    """Return the characters that stand for the bytes 0 to 255 in a byte-level vocabulary.

    Printable Latin-1 characters stand for themselves, the other 68 bytes for U+0100 and up, as in GPT-2.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    shifted = iter(range(0x100, 0x200))
    return "".join(chr(byte if byte in printable else next(shifted)) for byte in range(256))


def _to_latin_1() -> dict[int, int]:
    """Return, for ``str.translate``, character → the Latin-1 one of its byte, or one outside Latin-1."""
    outside = 0xFFFF
    table = dict.fromkeys(range(256), outside)
    table.update({ord(char): byte for byte, char in enumerate(byte_alphabet())})
    return table


class TokenPieces(NamedTuple):
    """Two tables by token id; an id that is in neither has no text."""

    whole: dict[int, str]
    """The text of the tokens that are whole characters; empty for those that detokenizing leaves out."""
    raw: dict[int, bytes]
    """The bytes of every token that has any."""

    @classmethod
    def of(cls, vocabulary: Mapping[str, int], *, skipped: Set[int]) -> "TokenPieces":
        """Return the pieces of ``vocabulary`` (token → id); ``skipped`` ids have no text."""
        whole: dict[int, str] = {}
        raw: dict[int, bytes] = {}
        table = _to_latin_1()
        for token, token_id in vocabulary.items():
            if token_id in skipped:
                whole[token_id] = ""
                continue
            try:
                piece = token.translate(table).encode("latin-1")
            except UnicodeEncodeError:
                # An added token holds its text as it is, not in the byte alphabet.
                piece = token.encode()
            raw[token_id] = piece
            try:
                whole[token_id] = piece.decode()
            except UnicodeDecodeError:
                # Part of a character: only its bytes mean something.
                continue
        return cls(whole=whole, raw=raw)

"""The longest text of one token, which bounds the text of a context."""

import json
import unicodedata
from collections.abc import Mapping, Sequence, Set
from typing import Literal, NamedTuple, TypeAlias

from tokenizers import Tokenizer as Backend
from tokenizers import models
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer


def byte_alphabet() -> str:
    """Return the characters that represent the bytes 0 to 255 in a byte-level vocabulary.

    Printable Latin-1 characters represent themselves, the other 68 bytes are U+0100 and up, as in GPT-2.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    shifted = iter(range(0x100, 0x200))
    return "".join(chr(byte if byte in printable else next(shifted)) for byte in range(256))


def _to_latin_1() -> dict[int, int]:
    """Return a ``str.translate`` table from the byte alphabet to Latin-1; others map outside Latin-1."""
    outside = 0xFFFF
    table = dict.fromkeys(range(256), outside)
    table.update({ord(char): byte for byte, char in enumerate(byte_alphabet())})
    return table


class TokenPieces(NamedTuple):
    """Two tables by token id; an id in neither has no text."""

    texts: dict[int, str]
    """The text of tokens with complete characters; empty for tokens that detokenizing leaves out."""
    raw: dict[int, bytes]
    """The bytes of every token, except those that detokenizing leaves out."""

    @classmethod
    def of(cls, vocabulary: Mapping[str, int], *, skipped: Set[int]) -> "TokenPieces":
        """Return the pieces of ``vocabulary`` (token → id); ``skipped`` ids have no text."""
        texts: dict[int, str] = {}
        raw: dict[int, bytes] = {}
        table = _to_latin_1()
        for token, token_id in vocabulary.items():
            if token_id in skipped:
                texts[token_id] = ""
                continue
            try:
                piece = token.translate(table).encode("latin-1")
            except UnicodeEncodeError:
                # An added token has plain text, not in the byte alphabet.
                piece = token.encode()
            raw[token_id] = piece
            try:
                texts[token_id] = piece.decode()
            except UnicodeDecodeError:
                # Part of a character: it has bytes and no text.
                continue
        return cls(texts=texts, raw=raw)


NormalForm: TypeAlias = Literal["NFC", "NFD", "NFKC", "NFKD"]

_FORMS: Mapping[str, NormalForm] = {
    "NFC": "NFC",
    "NFD": "NFD",
    "NFKC": "NFKC",
    "NFKD": "NFKD",
    "BertNormalizer": "NFD",
    "Precompiled": "NFKC",
}
"""The Unicode form that a normalizer step produces; SentencePiece's tables are close to NFKC."""

_NORMALIZED_AT_ONCE_CHARS = 16 * 1024
"""The piece that is normalized at once: it holds the GIL for about 1 ms."""

_COMPOSED_CHARS = 4
"""The most characters that NFC composes into one."""

_KEEPS_ALL = frozenset({"ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "FixedLength"})
_SHORTENS: Mapping[str, int] = {
    "NFC": _COMPOSED_CHARS,
    "NFKC": _COMPOSED_CHARS,
    "NFD": 1,
    "NFKD": 1,
    "Lowercase": 1,
    "Prepend": 1,
    "ByteLevel": 1,
}


def longest_token_chars(backend: Backend) -> int | None:
    """Return the most characters of a text that one token represents; None without a bound.

    There is no bound for a tokenizer that drops characters (spaces, accents), or that makes one token of any
    number of them: an unknown word, or an added token that strips the spaces next to it.
    """
    vocabulary = backend.get_vocab()
    added = backend.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):
        return None
    before = _parts(backend.normalizer)
    cuts = _parts(backend.pre_tokenizer)
    shortened = 1
    for part in before:
        factor = _shortened_by(part)
        if factor is None:
            return None
        shortened *= factor
    if not all(map(_keeps_all, cuts)):
        return None
    in_bytes = any(part.get("type") == "ByteLevel" for part in (*before, *cuts))
    if not _knows_all(backend, vocabulary, in_bytes=in_bytes):
        return None
    return shortened * max(map(len, vocabulary), default=1)


def normal_forms(backend: Backend) -> list[NormalForm]:
    """Return the Unicode forms that the steps of a tokenizer's normalizer produce."""
    kinds = {str(part.get("type")) for part in _parts(backend.normalizer)}
    return sorted({_FORMS[kind] for kind in kinds if kind in _FORMS})


def normalized_bytes(text: str, forms: Sequence[NormalForm]) -> int:
    """Return the UTF-8 length of a text or of its longest normal form: a ligature of 3 bytes becomes 33 in
    NFKC.
    """
    longest = 0
    for begin in range(0, len(text), _NORMALIZED_AT_ONCE_CHARS):
        piece = text[begin : begin + _NORMALIZED_AT_ONCE_CHARS]
        variants = [piece, *(unicodedata.normalize(form, piece) for form in forms)]
        longest += max(len(variant.encode("utf-8", "surrogatepass")) for variant in variants)
    return longest


def _knows_all(backend: Backend, vocabulary: Mapping[str, int], *, in_bytes: bool) -> bool:
    """Whether every text has tokens in the vocabulary, without an unknown token."""
    if not isinstance(backend.model, models.BPE):
        return False
    if in_bytes:
        return all(char in vocabulary for char in byte_alphabet())
    return backend.model.byte_fallback and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))


def _parts(stage: Normalizer | PreTokenizer | None) -> list[Mapping[str, object]]:
    """Return the steps of a normalizer or pre-tokenizer, as ``tokenizer.json`` has them."""
    if stage is None:
        return []
    written = json.loads(bytes(stage.__getstate__()))
    found: list[Mapping[str, object]] = []
    left = [written]
    while left:
        part = left.pop()
        inner = part.get("normalizers") or part.get("pretokenizers")
        if part.get("type") == "Sequence":
            left.extend(inner or ())
        else:
            found.append(part)
    return found


def _shortened_by(part: Mapping[str, object]) -> int | None:
    if part.get("type") != "Replace":
        return _SHORTENS.get(str(part.get("type")))
    pattern, content = part.get("pattern"), part.get("content")
    text = pattern.get("String") if isinstance(pattern, Mapping) else None
    if not isinstance(text, str) or not isinstance(content, str) or not content:
        return None
    return max(1, -(-len(text) // len(content)))


def _keeps_all(part: Mapping[str, object]) -> bool:
    if part.get("type") in ("Split", "Punctuation"):
        return part.get("behavior") != "Removed"
    return part.get("type") in _KEEPS_ALL

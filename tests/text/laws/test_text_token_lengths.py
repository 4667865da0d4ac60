"""No token stands for more text than its tokenizer says, so no prompt that fits is refused by its length."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from kvrouter.text.source import MOCK_FOLDER
from kvrouter.text.token_lengths import byte_alphabet, longest_token_chars

TEXTS = st.text(max_size=60) | st.text(
    alphabet=" \n\tab0é\u0301\u0323\u1fa7漢😀▁<|>", max_size=80
) | st.text(alphabet="o\u0302\u0309\u0345\u0313\u0300α", max_size=80)  # fmt: skip


def byte_level(normalizer: normalizers.Normalizer | None = None) -> Tokenizer:
    """The mock model's vocabulary, cut into words as most models do it."""
    tokenizer = Tokenizer.from_file(str(MOCK_FOLDER / "tokenizer.json"))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    words = pre_tokenizers.Split(Regex(r"\p{N}{1,3}|\s+|\w+"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return tokenizer


def with_bytes() -> Tokenizer:
    """As Llama's first models: characters, a mark for spaces, and bytes for everything else."""
    pieces = [*(f"<0x{byte:02X}>" for byte in range(256)), *"▁abo", "▁▁", "▁▁▁▁", "ab", "▁ab"]
    merges = [("▁", "▁"), ("▁▁", "▁▁"), ("a", "b"), ("▁", "ab")]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁"), normalizers.Replace("oo", "o")]
    )
    return tokenizer


KNOWN = {
    "bytes": byte_level(),
    "composed": byte_level(normalizers.NFC()),
    "compatible": byte_level(normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])),
    "decomposed": byte_level(normalizers.NFD()),
    "fallback": with_bytes(),
}


@pytest.mark.parametrize("kind", KNOWN)
@given(text=TEXTS)
def test_no_token_stands_for_more_text_than_the_longest_token(kind: str, text: str) -> None:
    tokenizer = KNOWN[kind]
    most = longest_token_chars(tokenizer)
    assert most is not None
    assert len(text) <= most * len(tokenizer.encode(text, add_special_tokens=False))


def test_added_special_tokens_count_for_the_longest_token() -> None:
    tokenizer = byte_level()
    assert longest_token_chars(tokenizer) == 13
    tokenizer.add_special_tokens(["<|" + "x" * 50 + "|>"])
    assert longest_token_chars(tokenizer) == 54


def words(model: models.Model) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def taking_spaces() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken("<|end|>", rstrip=True)])
    return tokenizer


def cut_by(pre_tokenizer: pre_tokenizers.PreTokenizer) -> Tokenizer:
    tokenizer = byte_level()
    byte_steps = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizer, byte_steps])
    return tokenizer


FEW = {"a": 0, "[UNK]": 1}
ALPHABET = {char: number for number, char in enumerate(byte_alphabet()) if char != "Ġ"}
UNBOUNDED = {
    "unknown words are one token": (
        words(models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]")),
        "b" * 90,
    ),
    "spaces are dropped": (words(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")), " " * 90),
    "unknown characters are one token": (Tokenizer(models.Unigram([("<unk>", 0.0)], 0, False)), "b" * 90),
    "what a vocabulary lacks is dropped": (Tokenizer(models.BPE(ALPHABET, [])), "漢" * 90),
    "a token takes the spaces behind it": (taking_spaces(), "<|end|>" + " " * 90),
    "accents are dropped": (byte_level(normalizers.StripAccents()), "\u0301" * 90),
    "spaces around are dropped": (byte_level(normalizers.Strip()), " " * 90),
    "spaces become one": (byte_level(normalizers.Replace(Regex(" +"), " ")), " " * 90),
    "words are deleted": (byte_level(normalizers.Replace("b", "")), "b" * 90),
    "pieces are removed": (cut_by(pre_tokenizers.Split(" ", "removed")), " " * 90),
    "punctuation is removed": (cut_by(pre_tokenizers.Punctuation("removed")), "!" * 90),
}


@pytest.mark.parametrize("kind", UNBOUNDED)
def test_tokenizers_without_a_bound_have_no_longest_token(kind: str) -> None:
    tokenizer, text = UNBOUNDED[kind]
    assert longest_token_chars(tokenizer) is None
    assert len(tokenizer.encode(text, add_special_tokens=False)) <= 1

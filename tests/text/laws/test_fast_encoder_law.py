"""A tokenizer that has a fast encoder gives the same ids as ``tokenizers``, for any text."""

import string
from collections.abc import Callable, Iterator
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from kvrouter.text import fast_encoder
from kvrouter.text.fast_encoder import TEXTS
from kvrouter.text.source import MOCK_FOLDER
from kvrouter.text.tokenizer import Tokenizer

LLAMA = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
UNKNOWN = r"\p{Lu}?[\p{Ll}_]+|\d|\s+|."
"""A pattern of no model: fastokens runs it by its general engine."""

ADDED = ("<|im_start|>", "<|im_end|>", "<think>", "[INST]", "<|x", "ab")


def trained(pattern: str, normalizer: normalizers.Normalizer | None, *, ignores_merges: bool) -> Backend:
    backend = Backend(models.BPE(ignore_merges=ignores_merges))
    if normalizer is not None:
        backend.normalizer = normalizer
    in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), in_bytes]
    )
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([*TEXTS, MOCK_FOLDER.joinpath("words.txt").read_text("utf-8")], trainer)
    backend.add_special_tokens(list(ADDED[:2]))
    backend.add_tokens([AddedToken(text, normalized=False) for text in ADDED[2:]])
    return backend


KINDS: dict[str, Callable[[], Backend]] = {
    "the mock model's": lambda: Backend.from_file(str(MOCK_FOLDER / "tokenizer.json")),
    "as Llama's": lambda: trained(LLAMA, None, ignores_merges=True),
    "as Qwen's": lambda: trained(LLAMA.replace("{1,3}", ""), normalizers.NFC(), ignores_merges=False),
    "of an unknown pattern": lambda: trained(UNKNOWN, None, ignores_merges=False),
}


@pytest.fixture(autouse=True, scope="module")
def many_fast_encoders() -> Iterator[None]:
    """Tokenizers of other tests in this process do not count here, and these do not count there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fast_encoder, "FAST_ENCODERS_MAX", 1000)
        yield
    both.cache_clear()


@cache
def both(kind: str) -> tuple[Backend, Tokenizer]:
    return KINDS[kind](), Tokenizer(KINDS[kind]())


TEXT = st.lists(
    st.one_of(
        st.text(max_size=20),
        st.text(" \n\r\t\u00a0a1.'", max_size=8),
        st.text(string.ascii_letters, max_size=40),
        st.sampled_from([*ADDED, *TEXTS, "'s", "'LL", "\u0301", "각", "🙂", "\x00"]),
        st.builds(lambda text, n: text * n, st.text(min_size=1, max_size=2), st.integers(2, 200)),
    ),
    max_size=12,
).map("".join)


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXT)
@settings(max_examples=150, deadline=None)
def test_the_fast_encoder_gives_the_ids_of_tokenizers(kind: str, text: str) -> None:
    reference, tokenizer = both(kind)
    assert tokenizer.why_slow is None
    assert tokenizer.encode(text).tolist() == reference.encode(text, add_special_tokens=False).ids


@given(text=TEXT)
def test_special_tokens_in_a_prompt_are_text_where_the_model_reads_none(text: str) -> None:
    reference, _ = both("as Llama's")
    tokenizer = Tokenizer(Backend.from_str(reference.to_str()), reads_specials=False)
    plain = Backend.from_str(reference.to_str())
    plain.encode_special_tokens = True
    assert tokenizer.why_slow is None
    assert tokenizer.encode_prompt(text).tolist() == plain.encode(text, add_special_tokens=False).ids

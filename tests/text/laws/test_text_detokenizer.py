"""Laws of incremental detokenization: cut as you like, the text is that of decoding all at once."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as Backend

from kvrouter.text.model import (
    HELD_TOKENS_MAX,
    ByteLevelDetokenizer,
    Detokenizer,
    WindowDetokenizer,
    make_detokenizer,
)
from kvrouter.text.source import MOCK_FOLDER
from kvrouter.text.token_lengths import byte_alphabet
from kvrouter.text.tokenizer import Tokenizer


def byte_level() -> Tokenizer:
    backend = Backend.from_file(str(MOCK_FOLDER / "tokenizer.json"))
    # Added tokens hold plain text: of the byte alphabet, partly outside it, and of other scripts.
    backend.add_tokens([AddedToken("née"), AddedToken("a b"), AddedToken("印"), AddedToken("\xad\x7f")])
    return Tokenizer(backend)


def sentence_piece() -> Tokenizer:
    """A vocabulary with byte fallback, of which the decoder strips the first space."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    tokens += [*"abcdefghijklmnopqrstuvwxyz.é你", "▁a", "▁b", "th"]
    model = models.BPE(
        vocab={token: token_id for token_id, token in enumerate(tokens)},
        merges=[("▁", "a"), ("▁", "b"), ("t", "h")],
        unk_token="<unk>",
        byte_fallback=True,
        fuse_unk=True,
    )
    backend = Backend(model)
    backend.add_special_tokens(["<s>", "</s>"])
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(backend)


BYTE_LEVEL = byte_level()
SENTENCE_PIECE = sentence_piece()
TEXTS = st.text(st.one_of(st.characters(codec="utf-8"), st.sampled_from(" 🚀👩‍💻你é\n\ufffdab")), max_size=40)
BYTES_OR_TOKENS = st.lists(
    st.one_of(st.integers(0, 255), st.integers(0, BYTE_LEVEL.vocab_size + 3), st.integers(4095, 4100))
)


def ids_of_bytes(content: bytes) -> list[int]:
    ids = (BYTE_LEVEL._backend.token_to_id(byte_alphabet()[byte]) for byte in content)
    return [token_id for token_id in ids if token_id is not None]


def stream(detokenizer: Detokenizer, ids: Sequence[int], draw: st.DataObject) -> str:
    """Push ``ids`` in drawn chunks and return all the text."""
    out = []
    at = 0
    while at < len(ids):
        size = draw.draw(st.integers(1, 4))
        out.append(detokenizer.push(ids[at : at + size]))
        at += size
    return "".join(out) + detokenizer.finish()


@given(BYTES_OR_TOKENS, st.data())
def test_byte_level_equals_decoding_all_at_once_for_any_ids(ids: list[int], draw: st.DataObject) -> None:
    detokenizer = make_detokenizer(BYTE_LEVEL)
    assert isinstance(detokenizer, ByteLevelDetokenizer)
    assert stream(detokenizer, ids, draw) == BYTE_LEVEL.decode(ids)


@given(st.one_of(st.binary(max_size=60), TEXTS.map(str.encode)), st.data())
def test_byte_level_equals_decoding_all_at_once_for_single_bytes(content: bytes, draw: st.DataObject) -> None:
    ids = ids_of_bytes(content)
    assert stream(make_detokenizer(BYTE_LEVEL), ids, draw) == content.decode(errors="replace")
    assert BYTE_LEVEL.decode(ids) == content.decode(errors="replace")


@given(TEXTS)
def test_byte_level_never_emits_half_a_character(text: str) -> None:
    detokenizer = make_detokenizer(BYTE_LEVEL)
    given_out = ""
    for token_id in ids_of_bytes(text.encode()):
        given_out += detokenizer.push([token_id])
        assert text.startswith(given_out)
    assert given_out == text
    assert detokenizer.finish() == ""


@given(TEXTS, TEXTS, st.data())
def test_a_resumed_stream_continues_the_delivered_text(before: str, after: str, draw: st.DataObject) -> None:
    for tokenizer in (BYTE_LEVEL, SENTENCE_PIECE):
        ids = tokenizer.encode(before + after)
        cut = draw.draw(st.integers(0, len(ids)))
        delivered = make_detokenizer(tokenizer).push(ids[:cut])
        resumed = make_detokenizer(tokenizer, context=ids[:cut])
        assert delivered + stream(resumed, ids[cut:], draw) == tokenizer.decode(ids)


@given(st.binary(max_size=60), st.data())
def test_a_byte_level_stream_can_be_resumed_inside_a_character(content: bytes, draw: st.DataObject) -> None:
    ids = ids_of_bytes(content)
    cut = draw.draw(st.integers(0, len(ids)))
    delivered = make_detokenizer(BYTE_LEVEL).push(ids[:cut])
    resumed = make_detokenizer(BYTE_LEVEL, context=ids[:cut])
    assert delivered + stream(resumed, ids[cut:], draw) == BYTE_LEVEL.decode(ids)


@given(TEXTS, st.data())
def test_window_detokenizer_equals_decoding_all_at_once_for_valid_text(
    text: str, draw: st.DataObject
) -> None:
    for tokenizer in (SENTENCE_PIECE, BYTE_LEVEL):
        ids = list(tokenizer.encode(text))
        assert stream(WindowDetokenizer(tokenizer), ids, draw) == tokenizer.decode(ids)


@given(st.lists(st.integers(0, 300)), st.data())
def test_window_detokenizer_emits_all_text_and_holds_few_tokens(ids: list[int], draw: st.DataObject) -> None:
    detokenizer = WindowDetokenizer(SENTENCE_PIECE)
    stream(detokenizer, ids, draw)
    assert detokenizer.finish() == ""
    for token_id in ids:
        detokenizer.push([token_id])
        assert len(detokenizer._held) < HELD_TOKENS_MAX


def test_special_tokens_do_not_drop_the_space_that_follows() -> None:
    detokenizer = WindowDetokenizer(SENTENCE_PIECE)
    ids = [*SENTENCE_PIECE.encode("a"), *[2] * HELD_TOKENS_MAX, *SENTENCE_PIECE.encode("b")]
    assert "".join([detokenizer.push([token_id]) for token_id in ids]) == "a b"

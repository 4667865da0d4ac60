"""What encoding a text holds at its peak is no more than it is counted as, with each kind of tokenizer."""

import gc
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
from tokenizers import Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from kvrouter.text import fast_encoder
from kvrouter.text.source import MOCK_FOLDER
from kvrouter.text.tokenizer import Tokenizer
from tests.system.hostile.meter import Meter

TEXT_BYTES = 140_000
"""A little more than a power of two: tables that double then hold the most."""

TEXTS = {
    "letters": "a",
    "letters and digits": "a1",
    "letters and blanks": "a ",
    "letters and dashes": "a-",
    "blanks": " ",
    "newlines": "\n",
    "digits": "1234567890",
    "punctuation": "!",
    "emoji": "😀",
    "CJK": "漢字語",
    "Hangul, decomposed three times as long": "각",
    "a note, composed three times as long": "\U0001d160",
    "accents": "\u0344",
    "a ligature, compatible eleven times as long": "\ufdfa",
    "special tokens": "<|endoftext|>",
}

LLAMA_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_level(
    normalizer: normalizers.Normalizer | None = None, cut: pre_tokenizers.PreTokenizer | None = None
) -> Backend:
    backend = Backend.from_file(str(MOCK_FOLDER / "tokenizer.json"))
    if normalizer is not None:
        backend.normalizer = normalizer
    if cut is not None:
        into_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([cut, into_bytes])
    return backend


def with_bytes() -> Backend:
    pieces = [*(f"<0x{byte:02X}>" for byte in range(256)), *"▁ab", "ab"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    backend = Backend(models.BPE(vocabulary, [("a", "b")], byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return backend


def unigram() -> Backend:
    pieces = [("<unk>", -10.0), *((char, -3.0) for char in "▁abcdefghij0123456789漢"), ("▁a", -2.0)]
    in_bytes = [(f"<0x{byte:02X}>", -8.0) for byte in range(256)]
    backend = Backend(models.Unigram([*pieces, *in_bytes], 0, True))
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    return backend


def word_piece() -> Backend:
    chars = "abcdefghijklmnopqrstuvwxyz0123456789漢!"
    pieces = ["[UNK]", *chars, *(f"##{char}" for char in chars)]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    backend = Backend(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return backend


def word_level() -> Backend:
    backend = Backend(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return backend


KINDS: dict[str, Callable[[], Backend]] = {
    "BPE, the mock model's": byte_level,
    "BPE, Llama's words": lambda: byte_level(None, pre_tokenizers.Split(Regex(LLAMA_WORDS), "isolated")),
    "BPE, single digits": lambda: byte_level(None, pre_tokenizers.Digits(individual_digits=True)),
    "BPE, composed": lambda: byte_level(normalizers.NFC()),
    "BPE, decomposed": lambda: byte_level(normalizers.NFD()),
    "BPE, compatible": lambda: byte_level(
        normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    ),
    "BPE, bytes as tokens": with_bytes,
    "Unigram": unigram,
    "WordPiece": word_piece,
    "WordLevel": word_level,
}


FAST_KINDS = ("BPE, the mock model's", "BPE, Llama's words", "BPE, single digits", "BPE, composed")


@pytest.mark.parametrize(
    ("kind", "fast"), [*((kind, False) for kind in KINDS), *((kind, True) for kind in FAST_KINDS)]
)
def test_encoding_holds_no_more_memory_than_counted(kind: str, fast: bool) -> None:
    """In a process for each kind, and a fork of it for each text: none finds what another one left."""
    ran = subprocess.run(
        [sys.executable, "-m", __name__, kind, str(int(fast))],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    assert len(lines) == len(TEXTS)
    over = [line for line in lines if int(line.split()[0]) > int(line.split()[1])]
    assert not over, "bytes held, bytes counted, of:\n" + "\n".join(over)


def measure(tokenizer: Tokenizer, text: str) -> str:
    """Return the bytes that encoding holds at its peak, and those that it is counted as."""
    text = text * (TEXT_BYTES // len(text.encode()))
    counted_bytes = tokenizer.encode_cost(len(text)).bytes_per_byte * tokenizer.normalized_bytes(text)
    gc.collect()
    meter = Meter(os.getpid())
    before_bytes = meter.resident_bytes()
    meter.forget_peak()
    tokenizer.encode(text)
    return f"{meter.peak_bytes() - before_bytes} {counted_bytes}"


def main(kind: str, fast: str) -> None:
    fast_encoder.FAST_ENCODERS_MAX = int(fast)
    tokenizer = Tokenizer(KINDS[kind]())
    assert (tokenizer.why_slow is None) == (fast == "1"), tokenizer.why_slow
    tokenizer.encode("a 1! 漢")
    for name, text in TEXTS.items():
        child = os.fork()
        if not child:
            print(measure(tokenizer, text), name, flush=True)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Small tokenizers in each format that engines know, and what the library of each makes of a text."""

import base64
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import sentencepiece
import tiktoken

Reference = Callable[[str], Sequence[int]]

SPECIALS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
WORDS = ("the", "ing", "hello", "world", "router", "user", "assistant", "cache", "naïve", "日本", "🙂")

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
MISTRAL = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Written(NamedTuple):
    """A folder with a tokenizer: what its own library makes of a text, and how a prompt begins."""

    folder: Path
    reference: Reference
    begin: Sequence[int] = ()


def _pieces() -> list[bytes]:
    """All bytes, then each word's beginnings with a space and without, so that merges lead to them."""
    pieces = dict.fromkeys(bytes([each]) for each in range(256))
    for word in WORDS:
        for raw in (word.encode(), b" " + word.encode()):
            pieces |= dict.fromkeys(raw[:size] for size in range(2, len(raw) + 1))
    return list(pieces)


def _printable() -> dict[int, str]:
    """GPT-2's letters for bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (each for each in range(256) if each not in plain)
    return {each: chr(each) for each in plain} | {each: chr(256 + at) for at, each in enumerate(others)}


def _config(folder: Path, **fields: object) -> None:
    content = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE, **fields}
    (folder / "tokenizer_config.json").write_text(json.dumps(content))


def _added(first_id: int) -> dict[str, int]:
    return {token: first_id + at for at, token in enumerate(SPECIALS)}


def _of_tiktoken(pattern: str, ranks: dict[bytes, int], specials: dict[str, int]) -> Reference:
    encoding = tiktoken.Encoding("small", pat_str=pattern, mergeable_ranks=ranks, special_tokens=specials)
    return lambda text: encoding.encode(text, allowed_special=set(specials), disallowed_special=())


def write_vocab_and_merges(folder: Path) -> Written:
    """As GPT-2 and Qwen 2: the class of the tokenizer stands in the configuration of the model."""
    letters = _printable()
    pieces = _pieces()
    written = ["".join(letters[byte] for byte in piece) for piece in pieces]
    ids = _added(len(pieces))
    (folder / "vocab.json").write_text(json.dumps({text: at for at, text in enumerate(written)}))
    halves = ((text[:at], text[at:]) for text in written for at in range(1, len(text)))
    merges = [f"{left} {right}" for left, right in halves if left in written and right in written]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    added = {str(ids[token]): {"content": token, "special": True} for token in SPECIALS}
    _config(folder, unk_token="</s>", added_tokens_decoder=added)
    ranks = {piece: at for at, piece in enumerate(pieces)}
    return Written(folder, _of_tiktoken(GPT2, ranks, ids))


def write_tiktoken(folder: Path, name: str = "tiktoken.model") -> Written:
    """As Llama 3: a token and its rank a line."""
    ranks = {piece: at for at, piece in enumerate(_pieces())}
    lines = [b"%s %d\n" % (base64.b64encode(piece), rank) for piece, rank in ranks.items()]
    (folder / name).write_bytes(b"".join(lines))
    ids = _added(len(ranks))
    added = {str(ids[token]): {"content": token, "special": True} for token in SPECIALS}
    _config(folder, tokenizer_class="PreTrainedTokenizerFast", added_tokens_decoder=added)
    return Written(folder, _of_tiktoken(LLAMA3, ranks, ids))


TEKKEN_SPECIALS = 8
"""Ids before the first piece; Mistral's files have a thousand."""


def write_tekken(folder: Path) -> Written:
    """As Mistral's own releases: nothing but this file, and no special token is read from a text."""
    pieces = _pieces()
    specials = ["<unk>", *SPECIALS]
    content = {
        "config": {
            "pattern": MISTRAL,
            "num_vocab_tokens": len(pieces),
            "default_vocab_size": len(pieces) + TEKKEN_SPECIALS,
            "default_num_special_tokens": TEKKEN_SPECIALS,
            "version": "v13",
        },
        "vocab": [
            {"rank": at, "token_bytes": base64.b64encode(piece).decode(), "token_str": None}
            for at, piece in enumerate(pieces)
        ],
        "special_tokens": [
            {"rank": at, "token_str": token, "is_control": True} for at, token in enumerate(specials)
        ],
    }
    (folder / "tekken.json").write_text(json.dumps(content))
    ranks = {piece: TEKKEN_SPECIALS + at for at, piece in enumerate(pieces)}
    return Written(folder, _of_tiktoken(MISTRAL, ranks, {}), begin=[1])


def write_sentencepiece(folder: Path, name: str = "tokenizer.model") -> Written:
    """As Llama 2: pieces of a text, bytes where there is none."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([" ".join(WORDS)] * 8 + ["it is 12345"] * 2),
        model_writer=model,
        vocab_size=360,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        control_symbols=["<|im_start|>", "<|im_end|>"],
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (folder / name).write_bytes(model.getvalue())
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    _config(folder, unk_token="<unk>", add_bos_token=True)
    return Written(folder, processor.encode, begin=[processor.bos_id()])


FORMATS: dict[str, Callable[[Path], Written]] = {
    "SentencePiece": write_sentencepiece,
    "tiktoken": write_tiktoken,
    "tekken": write_tekken,
    "vocab.json and merges.txt": write_vocab_and_merges,
}

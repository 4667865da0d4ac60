"""Which tokenizers have a fast encoder, what is logged of the others, and what encoding holds."""

import gc
import itertools
import json
import os
import string
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import NoReturn
from weakref import WeakValueDictionary

import pytest
from tokenizers import AddedToken, Regex, pre_tokenizers
from tokenizers import Tokenizer as Backend

from kvrouter.app.text_models import TextModelLoader
from kvrouter.core.errors import InvalidRequest
from kvrouter.core.ids import ModelName
from kvrouter.text import fast_encoder
from kvrouter.text.fast_encoder import (
    FAST_ENCODERS_MAX,
    FAST_TEXT_CHARS_MAX,
    TEXTS,
    FastEncoder,
    first_difference,
    samples,
)
from kvrouter.text.model import TextModel
from kvrouter.text.source import MOCK_FOLDER
from kvrouter.text.tokenizer import FAST, SLOW, EncodePool, Tokenizer
from tests.system.hostile.meter import MIB, Meter
from tests.testing.calls import WatchCalls
from tests.text.unit.test_text_encode_memory import unigram, with_bytes, word_level, word_piece

WORDS_A_TEXT = 26**3
GROWN_BYTES_MAX = 32 * MIB


@pytest.fixture(autouse=True)
def no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin without the encoders and refusals of tests that ran before in this process."""
    monkeypatch.setattr(fast_encoder, "_encoders", WeakValueDictionary())
    monkeypatch.setattr(fast_encoder, "_refused", {})


def backend(token: str | None = None) -> Backend:
    made = Backend.from_file(str(MOCK_FOLDER / "tokenizer.json"))
    if token is not None:
        made.add_tokens([token])
    return made


def why_slow(tokenizer: Tokenizer) -> str | None:
    return tokenizer.why_slow


def model_of(folder: Path, made: Backend) -> TextModel:
    made.save(str(folder / "tokenizer.json"))
    return TextModel.load(folder, context_length_tokens=10**6, pool=EncodePool(), needs_template=False)


def test_the_mock_model_has_a_fast_encoder() -> None:
    tokenizer = Tokenizer.from_folder(MOCK_FOLDER)
    assert (tokenizer.why_slow, tokenizer.encode_cost(1)) == (None, FAST)


@pytest.mark.parametrize("make", [unigram, word_piece, word_level])
def test_a_tokenizer_that_fastokens_does_not_read_is_encoded_as_ever(make: type) -> None:
    tokenizer, text = Tokenizer(make()), "a 1! 漢"
    assert (tokenizer.why_slow or "").startswith("fastokens does not read it: ")
    assert tokenizer.encode_cost(1) == SLOW
    assert tokenizer.encode(text).tolist() == make().encode(text, add_special_tokens=False).ids


def test_a_tokenizer_with_other_ids_is_encoded_as_ever() -> None:
    tokenizer = Tokenizer(with_bytes())
    assert (tokenizer.why_slow or "").startswith("fastokens gives other ids for ")
    for text in samples(with_bytes()):
        assert tokenizer.encode(text).tolist() == with_bytes().encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize(
    "pattern",
    [
        r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}|\s+(?!\S)|\s+|.",
        r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))|\p{L}+|\s+(?!\S)|\s+|.",
    ],
)
def test_a_pattern_beyond_the_limits_of_fastokens_is_encoded_as_ever(pattern: str) -> None:
    made = backend()
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([split, in_bytes])
    tokenizer = Tokenizer(made)
    assert (tokenizer.why_slow or "").startswith("fastokens refuses a text: ")
    assert tokenizer.encode_cost(1) == SLOW


@pytest.mark.parametrize(
    "token",
    [AddedToken("<t>", single_word=True), AddedToken("\n", lstrip=True), AddedToken(" ", rstrip=True)],
)
def test_an_added_token_that_fastokens_finds_elsewhere_has_no_fast_encoder(token: AddedToken) -> None:
    made = backend()
    made.add_tokens([token])
    assert Tokenizer(made).why_slow == f"fastokens may find the added token {token.content!r} elsewhere"


def test_the_id_that_a_file_states_of_an_added_token_is_not_fastokens_concern(tmp_path: Path) -> None:
    """It makes a table as long as the highest id: with this one it ended the process."""
    written = json.loads(backend("<zz>").to_str())
    written["added_tokens"][-1]["id"] = 4_000_000_000
    (tmp_path / "tokenizer.json").write_text(json.dumps(written))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert (tokenizer.why_slow, tokenizer.encode("<zz>").tolist()) == (None, [4096])


def test_a_refusal_is_remembered(watch_calls: WatchCalls) -> None:
    calls = watch_calls(fast_encoder, "first_difference")
    assert Tokenizer(with_bytes()).why_slow == Tokenizer(with_bytes()).why_slow
    assert len(calls) == 1


@pytest.mark.parametrize("reads_specials", [True, False])
def test_padding_and_truncation_of_a_file_change_no_prompt(reads_specials: bool) -> None:
    made = backend()
    made.enable_padding(length=64)
    made.enable_truncation(8)
    tokenizer = Tokenizer(Backend.from_str(made.to_str()), reads_specials=reads_specials)
    for text in ("a", "a 1!\n" * 20):
        ids = backend().encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text).tolist() == tokenizer.encode_prompt(text).tolist() == ids


@pytest.mark.parametrize("changed", ["a merge", "a token", "an added token"])
def test_the_check_at_load_finds_an_encoder_of_other_ids(changed: str) -> None:
    written = json.loads(backend("<think>").to_str())
    if changed == "a merge":
        written["model"]["ignore_merges"] = False
        del written["model"]["merges"][-1]
    elif changed == "a token":
        vocabulary = written["model"]["vocab"]
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    else:
        written["added_tokens"][-1]["lstrip"] = True
    assert first_difference(backend("<think>"), FastEncoder(backend("<think>").to_str())) is None
    assert first_difference(backend("<think>"), FastEncoder(json.dumps(written))) is not None


def test_the_check_at_load_reads_every_token_of_the_vocabulary() -> None:
    reference = backend()
    encodings = reference.encode_batch(list(samples(reference)), add_special_tokens=False)
    assert len(encodings) > 600
    read = {token_id for encoding in encodings for token_id in encoding.ids}
    vocabulary = reference.get_vocab()
    missing = {token for token, token_id in vocabulary.items() if token_id not in read}
    assert len(missing) < 0.1 * len(vocabulary), "half characters, and tokens that merges pass over"


def test_a_fifth_tokenizer_has_no_fast_encoder_until_another_ends() -> None:
    gc.collect()
    kept = [Tokenizer(backend(f"<{number}>")) for number in range(FAST_ENCODERS_MAX)]
    again = Tokenizer(backend("<0>"))
    fifth = Tokenizer(backend("<fifth>"))
    assert fifth.why_slow == "4 other tokenizers have fast encoders"
    assert again.why_slow is None
    del kept, again, fifth
    gc.collect()
    assert Tokenizer(backend("<fifth>")).why_slow is None


class Refusing:
    def encode_batch_flat(self, _texts: list[str], **_named: bool) -> NoReturn:
        raise ValueError("a limit of its regular expressions")


def test_a_fast_encoder_that_refuses_a_text_encodes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(backend())
    with pytest.raises(InvalidRequest, match="half a surrogate pair"):
        tokenizer.encode("a\ud800")
    assert why_slow(tokenizer) is None, "that is the text's fault"
    expected = tokenizer.encode(" router token")
    monkeypatch.setattr(tokenizer._fast, "_native", Refusing())
    assert tokenizer.encode(" router token") == expected
    assert why_slow(tokenizer) == "fastokens refuses a text: a limit of its regular expressions"
    assert tokenizer.encode_cost(1) == SLOW


def colliding_prompts() -> Iterator[str]:
    """Yield prompts of 16,380 characters, whose words have one hash in fastokens' cache."""
    letters = itertools.product(string.ascii_lowercase, repeat=6)
    words = (f" {s}{t}x{p}{q}{r}{u}{p}{q}{r}{u}k{s}{t}" for p, q, r, s, t, u in letters)
    while True:
        yield "".join(itertools.islice(words, 1092))


async def test_words_of_one_hash_stop_the_fast_encoder(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    model, reference, name = TextModel.load_mock(), backend(), ModelName("mock")
    TextModelLoader({}, model.pool, {name: model})
    assert why_slow(model.tokenizer) is None
    for text in itertools.islice(colliding_prompts(), 120):
        ids = await model.encode_prompt(text)
        assert ids.tolist() == reference.encode(text, add_special_tokens=False).ids
        if why_slow(model.tokenizer) is not None:
            break
    assert why_slow(model.tokenizer) == "texts took much longer than their length explains"
    assert model.tokenizer.encode_cost(1) == SLOW
    (line,) = [each.getMessage() for each in caplog.records if "tokenized_slowly" in each.getMessage()]
    assert "model=mock" in line
    assert "longer than their length" in line
    del model
    gc.collect()
    assert Tokenizer(backend()).why_slow is not None, "for the life of the process"


def test_ordinary_texts_do_not_stop_the_fast_encoder() -> None:
    tokenizer, random = Tokenizer(backend()), Random(5)
    kinds = (
        string.ascii_lowercase + " ",
        string.printable,
        "".join(map(chr, range(0x4E00, 0x9FFF))),
        "ab",
        " ",
    )
    for _ in range(20):
        for kind in kinds:
            tokenizer.encode("".join(random.choices(kind, k=16_384)))
        tokenizer.encode("".join(random.sample(TEXTS, len(TEXTS))) * 20)
    assert tokenizer.why_slow is None


@pytest.mark.parametrize(("pause_s", "stops_at"), [(0, 5), (50, 9), (101, None)])
def test_excess_adds_up_and_drains(
    monkeypatch: pytest.MonkeyPatch, pause_s: int, stops_at: int | None
) -> None:
    """Each text takes 100 ms more than its length explains, and the next comes after the pause."""
    encoder, ticks, pauses = FastEncoder(backend().to_str()), itertools.count(), itertools.count()
    clock = SimpleNamespace(
        thread_time=lambda: 0.10101 * next(ticks), monotonic=lambda: 1e6 + pause_s * next(pauses)
    )
    monkeypatch.setattr(fast_encoder, "time", clock)
    stopped = []
    for _ in range(40):
        encoder.encode("a")
        stopped.append(encoder.why_stopped is not None)
    assert stopped == [stops_at is not None and number >= stops_at for number in range(1, 41)]


def test_a_longer_text_than_stated_is_not_for_the_fast_encoder(watch_calls: WatchCalls) -> None:
    tokenizer, calls = Tokenizer(backend()), watch_calls(FastEncoder, "encode")
    for chars, expected in ((FAST_TEXT_CHARS_MAX, FAST), (FAST_TEXT_CHARS_MAX + 1, SLOW)):
        assert tokenizer.encode_cost(chars) == expected
        tokenizer.encode("a 1!\n" * (chars // 5) + "b" * (chars % 5))
    assert len(calls) == 1


async def test_the_reason_for_slow_encoding_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    texts = {ModelName("slow"): model_of(tmp_path, word_piece()), ModelName("fast"): TextModel.load_mock()}
    TextModelLoader({}, EncodePool(), texts)
    (line,) = [each.getMessage() for each in caplog.records if "tokenized_slowly" in each.getMessage()]
    assert "model=slow" in line
    assert "BertNormalizer" in line


@pytest.mark.parametrize(("make", "chars"), [(backend, 16_384), (word_piece, 8_192)])
async def test_only_longer_prompts_than_the_stated_are_passed_to_a_thread(
    tmp_path: Path, watch_calls: WatchCalls, make: type, chars: int
) -> None:
    model, here = model_of(tmp_path, make()), threading.current_thread().name
    calls = watch_calls(Tokenizer, "encode_prompt")
    for length in (chars, chars + 1):
        await model.encode_prompt("a" * length)
    assert [call.thread == here for call in calls] == [True, False]
    model.pool.close()


def test_the_cache_of_words_has_a_bound() -> None:
    """Six million words that were never seen: the second half adds nothing."""
    ran = subprocess.run(
        [sys.executable, "-m", __name__], capture_output=True, text=True, timeout=240, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) < GROWN_BYTES_MAX


def main() -> None:
    tokenizer, meter = Tokenizer(backend()), Meter(os.getpid())
    words = map("".join, itertools.product(string.ascii_lowercase, repeat=5))
    sizes = []
    for _ in range(2):
        for _ in range(170):
            tokenizer.encode(" ".join(itertools.islice(words, WORDS_A_TEXT)))
        sizes.append(meter.resident_bytes())
    assert tokenizer.why_slow is None, tokenizer.why_slow
    print(sizes[1] - sizes[0])


if __name__ == "__main__":
    main()

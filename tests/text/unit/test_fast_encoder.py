"""Which tokenizers have a fast encoder, what is logged of the others, and what encoding holds."""

import gc
import itertools
import json
import os
import string
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend

from kvrouter.app.text_models import TextModelLoader
from kvrouter.core.errors import InvalidRequest
from kvrouter.core.ids import ModelName
from kvrouter.text.fast_encoder import FAST_ENCODERS_MAX, FastEncoder, first_difference, samples
from kvrouter.text.model import TextModel
from kvrouter.text.source import MOCK_FOLDER
from kvrouter.text.tokenizer import FAST, SLOW, EncodePool, Tokenizer
from tests.system.hostile.meter import MIB, Meter
from tests.testing.calls import MakeFail, WatchCalls
from tests.text.unit.test_text_encode_memory import unigram, with_bytes, word_level, word_piece

WORDS_A_TEXT = 26**3
GROWN_BYTES_MAX = 32 * MIB


def backend(token: str | None = None) -> Backend:
    made = Backend.from_file(str(MOCK_FOLDER / "tokenizer.json"))
    if token is not None:
        made.add_tokens([token])
    return made


def model_of(folder: Path, made: Backend) -> TextModel:
    made.save(str(folder / "tokenizer.json"))
    return TextModel.load(folder, context_length_tokens=10**6, pool=EncodePool(), needs_template=False)


def test_the_mock_model_has_a_fast_encoder() -> None:
    tokenizer = Tokenizer.from_folder(MOCK_FOLDER)
    assert (tokenizer.why_slow, tokenizer.encode_cost) == (None, FAST)


@pytest.mark.parametrize("make", [unigram, word_piece, word_level])
def test_a_tokenizer_that_fastokens_does_not_read_is_encoded_as_ever(make: type) -> None:
    tokenizer, text = Tokenizer(make()), "a 1! 漢"
    assert (tokenizer.why_slow or "").startswith("fastokens does not read it: ")
    assert tokenizer.encode_cost == SLOW
    assert tokenizer.encode(text).tolist() == make().encode(text, add_special_tokens=False).ids


def test_a_tokenizer_with_other_ids_is_encoded_as_ever() -> None:
    tokenizer = Tokenizer(with_bytes())
    assert (tokenizer.why_slow or "").startswith("fastokens gives other ids for ")
    for text in samples(with_bytes()):
        assert tokenizer.encode(text).tolist() == with_bytes().encode(text, add_special_tokens=False).ids


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


def test_a_text_that_the_fast_encoder_refuses_is_encoded_by_tokenizers(make_fail: MakeFail) -> None:
    tokenizer = Tokenizer(backend())
    with pytest.raises(InvalidRequest, match="half a surrogate pair"):
        tokenizer.encode("a\ud800")
    expected = tokenizer.encode(" router token")
    failed = make_fail(FastEncoder, "encode", ValueError("a limit of its regular expressions"))
    assert (tokenizer.encode(" router token"), len(failed)) == (expected, 1)


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
    print(sizes[1] - sizes[0])


if __name__ == "__main__":
    main()

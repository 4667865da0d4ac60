"""The mock model's folder: what the script makes is what is shipped, and it loads."""

import importlib.util
from pathlib import Path

from kvrouter.text.model import FIRST_WORD_ID, mock_words
from kvrouter.text.source import MOCK_FOLDER
from kvrouter.text.tokenizer import Tokenizer

SCRIPT = Path(__file__).parents[3] / "scripts" / "make_mock_tokenizer.py"


def test_mock_tokenizer_script_reproduces_the_shipped_files() -> None:
    spec = importlib.util.spec_from_file_location("make_mock_tokenizer", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    made = {name: text.encode() for name, text in script.make_files().items()}
    shipped = {path.name: path.read_bytes() for path in MOCK_FOLDER.iterdir()}
    assert made == shipped


def test_every_byte_every_word_and_the_special_tokens_have_ids() -> None:
    tokenizer = Tokenizer.from_folder(MOCK_FOLDER)
    assert tokenizer.vocab_size == 4096
    assert tokenizer.eos_ids == {4095}
    assert tokenizer.special_ids == {4093, 4094, 4095}
    assert tokenizer.decode(range(0x20, 0x7F)) == "".join(map(chr, range(0x20, 0x7F)))
    assert len(set(mock_words())) == len(mock_words()) >= 1_000
    for number, word in enumerate(mock_words()):
        assert list(tokenizer.encode(f" {word}")) == [FIRST_WORD_ID + number]


def test_special_tokens_written_out_become_those_tokens() -> None:
    tokenizer = Tokenizer.from_folder(MOCK_FOLDER)
    assert list(tokenizer.encode("<|im_start|><|im_end|><|endoftext|>")) == [4094, 4095, 4093]
    assert tokenizer.decode([4094, 256, 4095]) == " able"

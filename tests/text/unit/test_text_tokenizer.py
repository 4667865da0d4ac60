"""Reading a model's folder: ids around the text, end tokens, and what is refused."""

import json
import shutil
from array import array
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import processors

from kvrouter.core.errors import ConfigError
from kvrouter.text.source import MOCK_FOLDER
from kvrouter.text.tokenizer import Tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    target = tmp_path / "model"
    shutil.copytree(MOCK_FOLDER, target)
    return target


def backend() -> Backend:
    return Backend.from_file(str(MOCK_FOLDER / "tokenizer.json"))


def with_processor(single: str) -> Tokenizer:
    made = backend()
    made.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=[("<|im_start|>", 4094), ("<|endoftext|>", 4093)]
    )
    return Tokenizer(made)


def test_token_ids_are_one_u32_buffer() -> None:
    ids = Tokenizer(backend()).encode(" router token")
    assert isinstance(ids, array)
    assert memoryview(ids).format == "I"
    assert ids.itemsize == 4
    assert Tokenizer(backend()).encode("") == array("I")


def test_completion_prompts_begin_with_the_post_processors_tokens() -> None:
    tokenizer = with_processor("<|im_start|> $A")
    assert list(tokenizer.bos_ids) == [4094]
    assert list(tokenizer.encode_prompt(" router")) == [4094, *tokenizer.encode(" router")]
    assert list(tokenizer.encode_prompt("")) == [4094]


def test_tokens_that_the_post_processor_appends_are_left_out() -> None:
    tokenizer = with_processor("$A <|endoftext|>")
    assert tokenizer.encode_prompt(" router") == tokenizer.encode(" router")


def test_truncation_and_padding_of_the_file_are_switched_off() -> None:
    made = backend()
    made.enable_truncation(2)
    made.enable_padding(length=8)
    assert len(Tokenizer(made).encode(" router token cache")) == 3


def test_end_tokens_are_collected_from_every_configuration_file(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 9}))
    assert Tokenizer.from_folder(folder).eos_ids == {7, 8, 9, 4095}
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|endoftext|>"}}))
    assert Tokenizer.from_folder(folder).eos_ids == {7, 8, 9, 4093}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{}", "is not a tokenizer"),
        ("tokenizer_config.json", "{", "cannot read"),
        ("config.json", "[]", "does not hold a JSON object"),
        ("tokenizer_config.json", '{"eos_token": "<nowhere>"}', "no end token"),
    ],
)
def test_a_broken_model_folder_is_refused_with_the_reason(
    folder: Path, name: str, content: str, message: str
) -> None:
    (folder / name).write_text(content)
    with pytest.raises(ConfigError, match=message):
        Tokenizer.from_folder(folder)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the tokenizer .*No such file"):
        Tokenizer.from_folder(tmp_path)

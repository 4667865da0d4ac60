"""Tokenizers in other formats than tokenizer.json: their tokens are those of the formats' own libraries."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from shutil import copy

import pytest

from kvrouter.core.errors import ConfigError
from kvrouter.text.model import TextModel
from kvrouter.text.prompts.fields import Prompt
from kvrouter.text.source import MOCK_FOLDER
from kvrouter.text.tokenizer import EncodePool, Tokenizer
from tests.testing.tokenizer_files import (
    FORMATS,
    SPECIALS,
    TEMPLATE,
    Written,
    write_sentencepiece,
    write_tekken,
    write_tiktoken,
)

TEXTS = (
    "hello world",
    "the router's cache, the naïve user",
    "日本語 текст 🙂🙃 e\u0301 ﬁ ①",
    "it's 12345 I'LL\n\n\tgo",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "\x00\x7f\u200b\ufeff",
    "",
)
SAID = [{"role": "user", "content": "hello the 🙂"}]
CHAT = "<s><|im_start|>user\nhello the 🙂<|im_end|>\n<|im_start|>assistant\n"


def text_model(folder: Path) -> TextModel:
    return TextModel.load(folder, context_length_tokens=1000, pool=EncodePool(), needs_template=False)


@pytest.fixture(params=sorted(FORMATS))
def written(request: pytest.FixtureRequest, tmp_path: Path) -> Written:
    return FORMATS[request.param](tmp_path)


def test_tokens_equal_those_of_each_formats_own_library(written: Written) -> None:
    tokenizer = Tokenizer.from_folder(written.folder)
    for text in TEXTS:
        assert list(tokenizer.encode_prompt(text)) == [*written.begin, *written.reference(text)], text
        assert tokenizer.decode(tokenizer.encode(text)).strip() == text.strip()


async def test_chat_templates_encode_with_one_id_per_special_token(written: Written) -> None:
    (written.folder / "chat_template.jinja").write_text(TEMPLATE.replace("{{ bos_token }}", "<s>"))
    model = text_model(written.folder)
    assert model.unread is None
    ids = list(await model.encode_chat(SAID))
    backend = model.tokenizer
    special = {token: backend.encode(token)[0] for token in SPECIALS}
    assert all(list(backend.encode(token)) == [special[token]] for token in SPECIALS)
    assert special.keys() == set(SPECIALS)
    assert len(set(special.values())) == len(SPECIALS)
    assert ids[:2] == [special["<s>"], special["<|im_start|>"]]
    assert ids == list(backend.encode(CHAT))
    assert ids.count(special["<|im_end|>"]) == 1


@pytest.mark.parametrize("write", [write_tiktoken, write_sentencepiece])
def test_the_format_of_tokenizer_model_is_detected(
    write: Callable[[Path, str], Written], tmp_path: Path
) -> None:
    written = write(tmp_path, "tokenizer.model")
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert list(tokenizer.encode(TEXTS[1])) == list(written.reference(TEXTS[1]))
    assert tokenizer.eos_ids == {tokenizer.encode("</s>")[0]}


# fmt: off
BY_MISTRAL_COMMON = {
    TEXTS[1]: [1, 265, 302, 47, 123, 335, 52, 268, 346, 309],
    TEXTS[2]: [
        1, 351, 240, 178, 166, 40, 217, 138, 216, 189, 216, 194, 217, 137, 217, 138, 364, 359, 139, 40, 109,
        212, 137, 40, 247, 180, 137, 40, 234, 153, 168,
    ],
    CHAT: [
        1, 68, 123, 70, 68, 132, 113, 117, 103, 123, 124, 105, 122, 124, 132, 70, 305, 18, 277, 268, 364, 68,
        132, 113, 117, 103, 109, 118, 108, 132, 70, 18, 68, 132, 113, 117, 103, 123, 124, 105, 122, 124, 132,
        70, 317, 18,
    ],
}
"""What mistral-common 1.13.1 makes of texts with the file of write_tekken; special tokens are text to it."""
# fmt: on


def test_tekken_is_read_as_mistral_common_reads_it(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write_tekken(tmp_path).folder)
    for text, ids in BY_MISTRAL_COMMON.items():
        assert list(tokenizer.encode_prompt(text)) == ids


def test_the_engines_choice_between_two_formats_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mistral, other = write_tekken(tmp_path), Tokenizer.from_folder(MOCK_FOLDER)
    copy(MOCK_FOLDER / "tokenizer.json", tmp_path)

    def ids() -> list[int]:
        return list(Tokenizer.from_folder(tmp_path).encode_prompt(TEXTS[1]))

    assert ids() == list(other.encode_prompt(TEXTS[1]))
    (tmp_path / "consolidated-00001-of-00002.safetensors").touch()
    assert ids() == [*mistral.begin, *mistral.reference(TEXTS[1])]
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert ids() == list(other.encode_prompt(TEXTS[1]))


def test_tekken_with_huggingface_weights_adds_no_begin_token(tmp_path: Path) -> None:
    mistral = write_tekken(tmp_path)
    (tmp_path / "model.safetensors").touch()
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert list(tokenizer.encode_prompt(TEXTS[1])) == list(mistral.reference(TEXTS[1]))
    assert len(tokenizer.encode_prompt("<s>")) == 1


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"tekken.json": "{}"}, "tekken.json cannot be converted: KeyError"),
        ({"tiktoken.model": "no base64"}, "tiktoken.model cannot be converted: "),
        ({"vocab.json": "{}", "merges.txt": ""}, "vocab.json, merges.txt cannot be converted: "),
        (
            {
                "tiktoken.model": "YQ== 0",
                "tokenizer_config.json": '{"auto_map": {"AutoTokenizer": ["tokenization.Own", null]}}',
                "tokenization.py": "raise SystemExit('code of the folder was run')",
            },
            "contains custom code",
        ),
    ],
)
def test_a_failed_conversion_is_refused_with_its_reason(
    files: dict[str, str], said: str, tmp_path: Path
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError) as refused:
        Tokenizer.from_folder(tmp_path)
    assert said in refused.value.message


def written_template(folder: Path, **files: object) -> None:
    copy(MOCK_FOLDER / "tokenizer.json", folder)
    for name, content in files.items():
        (folder / name.replace("_json", ".json")).write_text(json.dumps(content))


TOOL = [{"type": "function", "function": {"name": "f"}}]


def rendered(folder: Path) -> tuple[str, str]:
    template = text_model(folder).chat_template
    prompt = Prompt(SAID)
    return template.render_prompt(prompt), template.render_prompt(prompt._replace(tools=TOOL))


def test_a_template_is_found_where_engines_look_for_it(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    written_template(tmp_path, tokenizer_config_json={"chat_template": "one"})
    assert rendered(tmp_path) == ("one", "one")
    written_template(tmp_path, tokenizer_config_json={"chat_template": named})
    assert rendered(tmp_path) == ("plain", "tools")
    written_template(tmp_path, chat_template_json={"chat_template": "of the processor"})
    assert rendered(tmp_path) == ("of the processor", "tools")
    written_template(tmp_path, tokenizer_config_json={})
    assert rendered(tmp_path) == ("of the processor", "of the processor")
    (tmp_path / "chat_template.jinja").write_text("file")
    assert rendered(tmp_path) == ("file", "file")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("file with tools")
    assert rendered(tmp_path) == ("file", "file with tools")

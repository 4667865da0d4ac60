"""A model's text, from messages to tokens and back, on and off the event loop."""

import asyncio
import threading
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvrouter.core.errors import ConfigError, InvalidRequest
from kvrouter.text.encode_pool import EncodePool, EncodePoolFull
from kvrouter.text.model import TextModel
from kvrouter.text.tokenizer import Tokenizer
from kvrouter.text.words import FIRST_WORD_ID, MOCK_FOLDER, mock_words


class Gate:
    """An encoder that waits to be let through, and notes its threads."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.open = threading.Event()
        self.threads: list[str] = []

    def encode(self, text: str) -> "array[int]":
        self.threads.append(threading.current_thread().name)
        self.begun.set()
        if not self.open.wait(timeout=10):
            raise TimeoutError
        return array("I", [len(text)])


async def test_a_chat_of_words_has_an_exact_number_of_tokens() -> None:
    model = TextModel.load_mock()
    empty = await model.encode_chat([{"role": "user", "content": ""}])
    content = "".join(f" {word}" for word in mock_words())
    full = await model.encode_chat([{"role": "user", "content": content}])
    assert len(full) == len(empty) + len(mock_words())
    detokenizer = model.detokenizer()
    words = range(FIRST_WORD_ID, FIRST_WORD_ID + len(mock_words()))
    assert "".join([detokenizer.push([token_id]) for token_id in words]) + detokenizer.finish() == content
    model.pool.close()


async def test_on_and_off_the_loop_the_tokens_are_the_same() -> None:
    text = "".join(f" {word}" for word in mock_words())
    chat = [{"role": "user", "content": [{"type": "text", "text": text}]}]
    inline = TextModel.load_mock(pool=EncodePool(off_loop_chars=2 * len(text)))
    threaded = TextModel.load_mock(pool=EncodePool(off_loop_chars=0))
    assert await inline.encode_chat(chat) == await threaded.encode_chat(chat)
    assert await inline.encode_prompt(text) == await threaded.encode_prompt(text)
    threaded.pool.close()


async def test_a_long_chat_is_rendered_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    prepare_chat = TextModel.prepare_chat

    def noted(self: TextModel, messages: Sequence[Mapping[str, object]], **options: Any) -> str:
        threads.append(threading.current_thread().name)
        return prepare_chat(self, messages, **options)

    monkeypatch.setattr(TextModel, "prepare_chat", noted)
    model = TextModel.load_mock(pool=EncodePool(off_loop_chars=256))
    await model.encode_chat([{"role": "user", "content": "x" * 200}])
    await model.encode_chat([{"role": "user", "content": "x" * 256}])
    await model.encode_chat([{"role": "user", "content": "x"}] * 32)
    with pytest.raises(InvalidRequest) as refused:
        await model.encode_chat([{"role": "user", "content": ["x" * 256]}])
    assert refused.value.param == "messages[0].content[0]"
    here = threading.current_thread().name
    assert [name == here for name in threads] == [True, False, False, False]
    model.pool.close()


async def test_only_long_prompts_leave_the_loop_and_the_loop_goes_on() -> None:
    pool = EncodePool(off_loop_chars=4, threads=1)
    gate = Gate()
    long = asyncio.create_task(pool.encode(gate.encode, "12345", chars=5))
    assert await asyncio.to_thread(gate.begun.wait, 10)
    assert gate.threads[0].startswith("kvrouter-encode")
    gate.open.set()
    assert await pool.encode(gate.encode, "1234", chars=4) == array("I", [4])
    assert gate.threads[1] == threading.current_thread().name
    assert await long == array("I", [5])
    pool.close()


async def test_a_full_pool_refuses_and_takes_prompts_again_later() -> None:
    pool = EncodePool(off_loop_chars=0, threads=1, prompts_max=2)
    gate = Gate()
    tasks = [asyncio.create_task(pool.encode(gate.encode, "x", chars=1)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(EncodePoolFull) as refused:
        await pool.encode(gate.encode, "x", chars=1)
    assert refused.value.status_hint == 503
    tasks[1].cancel()
    await asyncio.wait(tasks[1:])
    tasks[1] = asyncio.create_task(pool.encode(gate.encode, "yy", chars=2))
    gate.open.set()
    assert await asyncio.gather(*tasks) == [array("I", [1]), array("I", [2])]
    assert len(gate.threads) == 2, "a cancelled prompt that had not begun is never encoded"
    pool.close()


def test_text_that_is_no_text_is_the_clients_fault() -> None:
    tokenizer = Tokenizer.from_folder(MOCK_FOLDER)
    with pytest.raises(InvalidRequest) as refused:
        tokenizer.encode("\ud800")
    assert refused.value.param == "prompt"


def test_a_model_without_a_template_takes_no_chat(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((MOCK_FOLDER / "tokenizer.json").read_bytes())
    model = TextModel.load(tmp_path, context_length_tokens=1_024, pool=EncodePool())
    with pytest.raises(InvalidRequest, match="no chat template"):
        model.prepare_chat([{"role": "user", "content": "x"}])
    with pytest.raises(ConfigError, match="context length"):
        TextModel.load(tmp_path, context_length_tokens=0, pool=model.pool)

"""A model's text, from messages to tokens and back, on and off the event loop."""

import asyncio
import threading
from array import array
from pathlib import Path

import pytest

from kvrouter.core.errors import ConfigError, ContextLengthExceeded, InvalidRequest
from kvrouter.text.model import FIRST_WORD_ID, TextModel, mock_words
from kvrouter.text.source import MOCK_FOLDER
from kvrouter.text.tokenizer import (
    SLOW,
    EncodeLimits,
    EncodePool,
    EncodePoolFull,
    PromptOverBudget,
    Tokenizer,
)
from tests.testing.calls import MakeFail, WatchCalls
from tests.testing.waits import until


class Gate:
    """An encoder that waits to be let through, and notes its threads."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.open = threading.Event()
        self.threads: list[str] = []
        self.lengths: list[int] = []

    def encode(self, text: str) -> "array[int]":
        self.threads.append(threading.current_thread().name)
        self.lengths.append(len(text))
        self.begun.set()
        if not self.open.wait(timeout=60):
            raise TimeoutError
        return array("I", [len(text)])


async def test_each_mock_word_adds_one_token_to_a_chat() -> None:
    model = TextModel.load_mock()
    empty = await model.encode_chat([{"role": "user", "content": ""}])
    content = "".join(f" {word}" for word in mock_words())
    full = await model.encode_chat([{"role": "user", "content": content}])
    assert len(full) == len(empty) + len(mock_words())
    detokenizer = model.detokenizer()
    words = range(FIRST_WORD_ID, FIRST_WORD_ID + len(mock_words()))
    assert "".join([detokenizer.push([token_id]) for token_id in words]) + detokenizer.finish() == content
    model.pool.close()


async def test_tokens_are_the_same_on_and_off_the_event_loop() -> None:
    text = "".join(f" {word}" for word in mock_words())
    chat = [{"role": "user", "content": [{"type": "text", "text": text}]}]
    inline = TextModel.load_mock(pool=EncodePool(EncodeLimits(off_loop_chars=2 * len(text))))
    threaded = TextModel.load_mock(pool=EncodePool(EncodeLimits(off_loop_chars=0)))
    assert await inline.encode_chat(chat) == await threaded.encode_chat(chat)
    assert await inline.encode_prompt(text) == await threaded.encode_prompt(text)
    threaded.pool.close()


async def test_a_long_chat_is_rendered_off_the_loop(watch_calls: WatchCalls) -> None:
    renderings = watch_calls(TextModel, "prepare_chat")
    model = TextModel.load_mock(pool=EncodePool(EncodeLimits(off_loop_chars=256)))
    await model.encode_chat([{"role": "user", "content": "x" * 200}])
    await model.encode_chat([{"role": "user", "content": "x" * 256}])
    await model.encode_chat([{"role": "user", "content": "x"}] * 32)
    with pytest.raises(InvalidRequest) as refused:
        await model.encode_chat([{"role": "user", "content": ["x" * 256]}])
    assert refused.value.param == "messages[0].content[0]"
    here = threading.current_thread().name
    assert [call.thread == here for call in renderings] == [True, False, False, False]
    model.pool.close()


async def test_only_long_prompts_are_encoded_off_the_event_loop() -> None:
    pool = EncodePool(EncodeLimits(off_loop_chars=4), threads=1)
    gate = Gate()
    long = asyncio.create_task(pool.encode(gate.encode, "12345", field="prompt"))
    assert await asyncio.to_thread(gate.begun.wait, 10)
    assert gate.threads[0].startswith("kvrouter-encode")
    gate.open.set()
    assert await pool.encode(gate.encode, "1234", field="prompt") == array("I", [4])
    assert gate.threads[1] == threading.current_thread().name
    assert await long == array("I", [5])
    pool.close()


async def test_a_full_encode_pool_refuses_prompts_until_it_has_room() -> None:
    pool = EncodePool(EncodeLimits(off_loop_chars=0, waiting_max=1), threads=1)
    gate = Gate()
    tasks = [asyncio.create_task(pool.encode(gate.encode, "x", field="prompt")) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(EncodePoolFull) as refused:
        await pool.encode(gate.encode, "x", field="prompt")
    assert refused.value.status_hint == 503
    tasks[1].cancel()
    await asyncio.wait(tasks[1:])
    tasks[1] = asyncio.create_task(pool.encode(gate.encode, "yy", field="prompt"))
    gate.open.set()
    assert await asyncio.gather(*tasks) == [array("I", [1]), array("I", [2])]
    assert len(gate.threads) == 2, "a cancelled prompt that had not begun is never encoded"
    pool.close()


async def test_prompts_wait_in_order_for_encode_memory() -> None:
    pool = EncodePool(EncodeLimits(off_loop_chars=0, bytes_max=10 * SLOW.bytes_per_byte), threads=2)
    gate = Gate()
    first = asyncio.create_task(pool.encode(gate.encode, "x" * 6, field="prompt"))
    assert await asyncio.to_thread(gate.begun.wait, 10)
    large = asyncio.create_task(pool.encode(gate.encode, "x" * 10, field="prompt"))
    small = asyncio.create_task(pool.encode(gate.encode, "xx", field="prompt"))
    await asyncio.sleep(0)
    assert pool.held_bytes == 6 * SLOW.bytes_per_byte
    gate.open.set()
    assert [list(ids) for ids in await asyncio.gather(first, large, small)] == [[6], [10], [2]]
    assert gate.lengths == [6, 10, 2], "the small one, for which there was room, did not pass the large one"
    await until(lambda: pool.held_bytes == 0)
    pool.close()


async def test_a_prompt_over_the_encode_budget_is_refused_at_once() -> None:
    pool = EncodePool(EncodeLimits(off_loop_chars=0, bytes_max=10 * SLOW.bytes_per_byte))
    gate = Gate()
    for text in ("x" * 11, "é" * 6, "\N{GRINNING FACE}" * 3):
        with pytest.raises(PromptOverBudget, match="KVROUTER_TOKENIZE_MAX_BYTES") as refused:
            await pool.encode(gate.encode, text, field="messages")
        assert (refused.value.status_hint, refused.value.param) == (413, "messages")
        assert len(pool.fits(text, SLOW).encode()) <= 10
    gate.open.set()
    assert await pool.encode(gate.encode, "é" * 5, field="messages") == array("I", [5])
    pool.close()


async def test_a_prompt_waiting_too_long_is_refused_and_cancelling_frees_memory() -> None:
    pool = EncodePool(EncodeLimits(off_loop_chars=0, wait_s=0.01), threads=1)
    gate = Gate()
    begun = asyncio.create_task(pool.encode(gate.encode, "x", field="prompt"))
    assert await asyncio.to_thread(gate.begun.wait, 10)
    with pytest.raises(EncodePoolFull, match="waited") as refused:
        await pool.encode(gate.encode, "x", field="prompt")
    assert refused.value.status_hint == 503
    begun.cancel()
    await asyncio.wait([begun])
    assert pool.held_bytes == SLOW.bytes_per_byte, "what has begun holds its memory until it ends"
    gate.open.set()
    await until(lambda: pool.held_bytes == 0)
    assert await pool.encode(gate.encode, "xx", field="prompt") == array("I", [2])
    pool.close()


async def test_a_text_too_long_for_the_context_is_not_tokenized(make_fail: MakeFail) -> None:
    model = TextModel.load_mock(context_length_tokens=100)
    long = "x" * (model.prompt_max_chars + 1)
    assert len(await model.encode_prompt(long[1:])) > 100
    make_fail(Tokenizer, "encode", AssertionError("it was tokenized"))
    for encode in (
        model.encode_prompt(long),
        model.encode_chat([{"role": "user", "content": long}]),
        model.encode_chat([{"role": "user", "content": "x" * 2_000_000}]),
    ):
        with pytest.raises(ContextLengthExceeded, match="KVROUTER_TOKEN_MAX_CHARS"):
            await encode
    model.pool.close()


def test_half_a_surrogate_pair_is_an_invalid_prompt() -> None:
    tokenizer = Tokenizer.from_folder(MOCK_FOLDER)
    with pytest.raises(InvalidRequest) as refused:
        tokenizer.encode("\ud800")
    assert refused.value.param == "prompt"


def test_a_model_without_a_chat_template_refuses_chats(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((MOCK_FOLDER / "tokenizer.json").read_bytes())
    model = TextModel.load(tmp_path, context_length_tokens=1_024, pool=EncodePool())
    with pytest.raises(InvalidRequest, match="no chat template"):
        model.prepare_chat([{"role": "user", "content": "x"}])
    with pytest.raises(ConfigError, match="context length"):
        TextModel.load(tmp_path, context_length_tokens=0, pool=model.pool)

"""A model's tokenizer, and a pool of threads that encodes within a memory budget."""

import asyncio
import json
import sys
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

from tokenizers import Tokenizer as Backend
from tokenizers import decoders

from kvrouter.core import allocator
from kvrouter.core.errors import BodyTooLarge, ConfigError, InvalidRequest, Unavailable
from kvrouter.core.requests import TokenBuffer
from kvrouter.text.converted import converted_backend, is_read_by_mistral, other_formats
from kvrouter.text.fast_encoder import FAST_TEXT_CHARS_MAX, FastEncoder, FastEncoderRefused, fast_encoder
from kvrouter.text.token_lengths import TokenPieces, longest_token_chars, normal_forms, normalized_bytes


def read_json_object(path: Path) -> Mapping[str, object]:
    """Return the JSON object in ``path``, empty without the file; ``ConfigError`` for other content."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {path}: {error}", param=str(path)) from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} does not hold a JSON object", param=str(path))
    return content


def token_content(entry: object) -> str | None:
    """Return the text of a token in a configuration, a string or ``{"content": …}``."""
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else None


EOS_FILES = ("generation_config.json", "config.json")


class Tokenizer:
    """One model's tokenizer. Immutable and thread-safe."""

    def __init__(
        self,
        backend: Backend,
        *,
        eos_tokens: Iterable[str] = (),
        eos_ids: Iterable[int] = (),
        reads_specials: bool = True,
    ) -> None:
        """Take over ``backend``. An ``eos_tokens`` entry outside the vocabulary raises ConfigError. Without
        ``reads_specials``, a special token written in a completion's prompt is text.
        """
        backend.no_truncation()
        backend.no_padding()
        self._backend = self._prompt_backend = backend
        self._fast: FastEncoder | None = None
        self._why_refused: str | None = None
        if not reads_specials:
            self._prompt_backend = Backend.from_str(backend.to_str())
            self._prompt_backend.encode_special_tokens = True
        try:
            self._fast = fast_encoder(backend)
        except FastEncoderRefused as refused:
            self._why_refused = str(refused)
        vocabulary = backend.get_vocab()
        added = backend.get_added_tokens_decoder()
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        """One more than the highest token id."""
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        """The ids without text in detokenizing."""
        self.eos_ids = frozenset(eos_ids) | {_id_of(vocabulary, token) for token in eos_tokens}
        """The ids that end an answer."""
        self.bos_ids = _ids_before_text(backend)
        """The ids that the post-processor puts before a text, usually one or zero."""
        self.token_max_chars = longest_token_chars(backend)
        """The most characters of a text that one token represents; None without a bound."""
        self._normal_forms = normal_forms(backend)
        self.pieces = None
        """The text of each token, for models whose decoder is byte-level; None for all others."""
        if isinstance(backend.decoder, decoders.ByteLevel):
            self.pieces = TokenPieces.of(vocabulary, skipped=self.special_ids)

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer":
        """Read ``tokenizer.json``, else another format, and, where they exist, the configurations that name
        the end tokens.
        """
        eos_token = token_content(read_json_object(folder / "tokenizer_config.json").get("eos_token"))
        eos_ids: set[int] = set()
        for name in EOS_FILES:
            eos_ids.update(_as_ids(read_json_object(folder / name).get("eos_token_id")))
        return cls(
            _backend_of(folder),
            eos_tokens=[eos_token] if eos_token else [],
            eos_ids=eos_ids,
            reads_specials=not is_read_by_mistral(folder),
        )

    @property
    def why_slow(self) -> str | None:
        """Why texts are encoded by the ``tokenizers`` library; None with a fast encoder."""
        return self._why_refused if self._fast is None else self._fast.why_stopped

    def when_slow(self, name: str, call: Callable[[str], None]) -> None:
        """Let ``call`` be called, in any thread, when the fast encoder is stopped; one for each name."""
        if self._fast is not None:
            self._fast.on_stop[name] = call

    def encode_cost(self, chars: int) -> "EncodeCost":
        """Return what encoding a text of ``chars`` characters costs."""
        return SLOW if self._encoder_for(chars) is None else FAST

    def _encoder_for(self, chars: int) -> FastEncoder | None:
        fast = self._fast
        if fast is None or fast.why_stopped is not None or chars > FAST_TEXT_CHARS_MAX:
            return None
        return fast

    def encode(self, text: str) -> TokenBuffer:
        """Return the ids of ``text`` without additions, for rendered chats. Releases the GIL.

        A special token written in ``text`` becomes that special token, as in every engine.
        """
        return self._encoded(self._backend, text)

    def encode_prompt(self, text: str) -> TokenBuffer:
        """Return the ids of a plain completion prompt: ``bos_ids``, then those of ``text``."""
        ids = self._encoded(self._prompt_backend, text)
        return self.bos_ids + ids if self.bos_ids else ids

    def _encoded(self, backend: Backend, text: str) -> TokenBuffer:
        fast = self._encoder_for(len(text))
        if fast is not None:
            # Half a surrogate pair, or a text beyond a limit of its regular expressions, is for the other.
            try:
                return fast.encode(text, reads_specials=not backend.encode_special_tokens)
            except ValueError:
                pass
        return _encoded(backend, text)

    def normalized_bytes(self, text: str) -> int:
        """Return the UTF-8 length of the normalized ``text``, which determines the memory of its encoding."""
        return normalized_bytes(text, self._normal_forms)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ``token_ids``; special and unknown ids have none; bad UTF-8 becomes U+FFFD."""
        return self._backend.decode(token_ids, skip_special_tokens=True)


def _encoded(backend: Backend, text: str) -> TokenBuffer:
    # Only the batch form skips offsets; it takes two thirds of the time of a plain encode.
    try:
        (encoding,) = backend.encode_batch_fast([text], add_special_tokens=False)
    except TypeError as error:
        raise InvalidRequest("the prompt is not text, or half a surrogate pair", param="prompt") from error
    return array("I", encoding.ids)


def _backend_of(folder: Path) -> Backend:
    """Return the tokenizer of a folder."""
    path = folder / "tokenizer.json"
    if not path.exists() and other_formats(folder):
        return converted_backend(folder)
    if is_read_by_mistral(folder) and find_spec("transformers") is not None:
        return converted_backend(folder)  # the two may differ, and the engine uses this one
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the tokenizer {path}: {error.strerror}", param=str(path)) from error
    try:
        return Backend.from_buffer(content)
    except ValueError as error:
        raise ConfigError(f"{path} is not a tokenizer: {error}", param=str(path)) from error


def _as_ids(entry: object) -> list[int]:
    """Return the ids of an entry: an id, a list of ids, or None."""
    entries = entry if isinstance(entry, list) else [entry]
    return [each for each in entries if isinstance(each, int)]


def _id_of(vocabulary: Mapping[str, int], token: str) -> int:
    token_id = vocabulary.get(token)
    if token_id is None:
        raise ConfigError(f"the vocabulary has no end token {token!r}", param="eos_token")
    return token_id


def _ids_before_text(backend: Backend) -> TokenBuffer:
    """Return the ids that the post-processor adds in front, without those that it adds at the end."""
    plain = backend.encode("a", add_special_tokens=False).ids
    processed = backend.encode("a", add_special_tokens=True).ids
    start = next((at for at in range(len(processed)) if processed[at : at + len(plain)] == plain), 0)
    return array("I", processed[:start])


@dataclass(frozen=True, slots=True)
class EncodeCost:
    """What encoding costs with one kind of encoder."""

    off_loop_chars: int
    """Longer prompts are encoded in a thread."""
    bytes_per_byte: int
    """The assumed memory of encoding per byte of normalized text."""


SLOW = EncodeCost(8_192, 512)
"""By ``tokenizers``: 3 to 8 ms of encoding. Measured memory, by tokenizer: 140 to 190 for prose, code or one
repeated letter, 330 to 460 where each character is a word and a token.
"""

FAST = EncodeCost(16_384, 128)
"""By a fast encoder: 0.15 ms for prose and code, 0.8 ms for words that are all new, 4 ms for noise; and once
in a thread each up to 0.1 s for the first text, and 30, 58 and 119 ms when its cache of words grows.
Measured memory: 10 to 70, and up to 105 after a text so long that the allocator maps no more of its own.
"""

TOKEN_CHARS_UNKNOWN = 128
"""The assumed limit of a token's characters for tokenizers without a bound."""

TRIMMED_BYTES = 64 * 1024 * 1024
"""An encoding of this memory is followed by a trim, else the allocator keeps much of the memory."""

_COUNTED_ON_LOOP_CHARS = 16 * 1024

T = TypeVar("T")
R = TypeVar("R")


TOKEN_TEXT_BYTES = 4
"""The average text of a token in English prose and code."""


def utf8_bytes(text: str) -> int:
    """Return the UTF-8 length of a text, which may have halves of surrogate pairs."""
    return len(text.encode("utf-8", "surrogatepass"))


class EncodePoolFull(Unavailable):
    """Too many long prompts wait to be tokenized, or one waited too long."""

    code = "encode_pool_full"


class PromptOverBudget(BodyTooLarge):
    """Tokenizing this prompt alone would exceed the memory budget of all."""

    code = "prompt_over_budget"


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeLimits:
    """The limits of tokenizing: memory, threads and waiting."""

    off_loop_chars: int | None = None
    """Longer prompts are encoded in a thread; None: as the text's ``EncodeCost`` has it."""
    bytes_max: int = 512 * 1024 * 1024
    """The memory budget of all running encodings, counted by ``EncodeCost``."""
    waiting_max: int = 256
    """The most prompts that wait for a thread or for memory."""
    wait_s: float = 10.0
    """The longest wait of a prompt."""
    token_max_chars: int | None = None
    """The most characters of a token; None: as the vocabulary has it."""


class EncodePool:
    """Threads that encode long prompts, shared by all models of a process.

    Running encodings stay within the budget; further prompts wait in one FIFO queue, so that large ones get
    their turn.
    """

    def __init__(self, limits: EncodeLimits | None = None, *, threads: int = 2) -> None:
        self.limits = EncodeLimits() if limits is None else limits
        self.held_bytes = 0
        """The counted memory of running encodings."""
        self._free_threads = threads
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="kvrouter-encode")

    def leaves_loop(self, chars: int, cost: EncodeCost) -> bool:
        """Whether a prompt of ``chars`` characters is encoded in a thread."""
        stated = self.limits.off_loop_chars
        return chars > (cost.off_loop_chars if stated is None else stated)

    def text_max_bytes(self, cost: EncodeCost) -> int:
        """Return the longest text that can be encoded within the budget, in bytes of UTF-8."""
        return self.limits.bytes_max // cost.bytes_per_byte

    def fits(self, text: str, cost: EncodeCost) -> str:
        """Return the longest beginning of ``text`` that can be encoded within the budget."""
        return text[: self.text_max_bytes(cost) // _char_bytes_max(text)]

    def refuse_over_budget(
        self, text_bytes: int, cost: EncodeCost, *, field: str, bytes_max: int | None = None
    ) -> None:
        """Raise PromptOverBudget, which names the field, for a text over ``text_max_bytes``, or over
        ``bytes_max`` if that is more.
        """
        most_bytes = max(self.text_max_bytes(cost), bytes_max or 0)
        if text_bytes > most_bytes:
            raise PromptOverBudget(
                f"{field}: {text_bytes} bytes of text, and at most {most_bytes} are tokenized: all prompts "
                f"together may take {self.limits.bytes_max} bytes of memory, {cost.bytes_per_byte} for each "
                "(KVROUTER_TOKENIZE_MAX_BYTES)",
                param=field,
            )

    async def encode(
        self,
        encode: Callable[[str], TokenBuffer],
        text: str,
        *,
        field: str,
        cost: EncodeCost = SLOW,
        count_bytes: Callable[[str], int] = utf8_bytes,
    ) -> TokenBuffer:
        """Return ``encode(text)``; ``field`` is the text's field, ``count_bytes`` returns the UTF-8 length of
        a normalized text that is not ASCII.

        Raises PromptOverBudget, which names the field, for a text over the budget, and EncodePoolFull when
        too many prompts wait, or this one waited too long. Cancelling the caller gives up its place; a
        started encoding runs to its end and holds its memory until then.
        """
        if not self.leaves_loop(len(text), cost):
            return encode(text)
        text_bytes = await self._count(count_bytes, text)
        self.refuse_over_budget(text_bytes, cost, field=field)
        need_bytes = cost.bytes_per_byte * text_bytes
        return await self.run(partial(_then_trim, encode, need_bytes), text, need_bytes=need_bytes)

    async def run(self, work: Callable[[T], R], argument: T, *, need_bytes: int = 0) -> R:
        """Return ``work(argument)``, run in a thread once a thread and ``need_bytes`` of memory are free."""
        await self._admit(need_bytes)
        try:
            done = self._threads.submit(work, argument)
        except BaseException:
            self._release(need_bytes)
            raise
        loop = asyncio.get_running_loop()
        done.add_done_callback(partial(self._release_soon, loop, need_bytes))
        return await asyncio.wrap_future(done)

    def close(self) -> None:
        """Refuse further prompts, and end the threads after their current encodings."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _count(self, count_bytes: Callable[[str], int], text: str) -> int:
        if text.isascii():
            return len(text)
        if len(text) <= _COUNTED_ON_LOOP_CHARS:
            return count_bytes(text)
        return await self.run(count_bytes, text)

    async def _admit(self, need_bytes: int) -> None:
        limits = self.limits
        if not self._waiting and self._has_room(need_bytes):
            self._take(need_bytes)
            return
        if len(self._waiting) >= limits.waiting_max:
            raise EncodePoolFull(
                f"{len(self._waiting)} long prompts wait to be tokenized (KVROUTER_TOKENIZE_WAITING_MAX)"
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        place = (need_bytes, turn)
        self._waiting.append(place)
        try:
            async with asyncio.timeout(limits.wait_s):
                await turn
        except BaseException as error:
            if place in self._waiting:
                self._waiting.remove(place)
                self._admit_waiting()
            elif turn.done() and not turn.cancelled():
                self._release(need_bytes)
            if isinstance(error, TimeoutError):
                raise EncodePoolFull(
                    f"a long prompt waited {limits.wait_s:g} s to be tokenized (KVROUTER_TOKENIZE_WAIT_S)"
                ) from None
            raise

    def _has_room(self, need_bytes: int) -> bool:
        return self._free_threads > 0 and self.held_bytes + need_bytes <= self.limits.bytes_max

    def _take(self, need_bytes: int) -> None:
        self._free_threads -= 1
        self.held_bytes += need_bytes

    def _release_soon(self, loop: asyncio.AbstractEventLoop, need_bytes: int, _: "Future[R]") -> None:
        with suppress(RuntimeError):  # the loop has ended, and no caller waits
            loop.call_soon_threadsafe(self._release, need_bytes)

    def _release(self, need_bytes: int) -> None:
        self._free_threads += 1
        self.held_bytes -= need_bytes
        self._admit_waiting()

    def _admit_waiting(self) -> None:
        while self._waiting and self._has_room(self._waiting[0][0]):
            need_bytes, turn = self._waiting.popleft()
            if not turn.done():
                self._take(need_bytes)
                turn.set_result(None)


def _char_bytes_max(text: str) -> int:
    """Return the most UTF-8 bytes of a character in a text, by Python's storage width of the text."""
    if text.isascii():
        return 1
    return 2 if sys.getsizeof(text) < 2 * len(text) else 4


def _then_trim(encode: Callable[[str], TokenBuffer], need_bytes: int, text: str) -> TokenBuffer:
    try:
        return encode(text)
    finally:
        if need_bytes >= TRIMMED_BYTES:
            allocator.trim()

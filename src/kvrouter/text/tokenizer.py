"""The tokenizer of ``tokenizer.json``, and a pool of threads that encodes within a memory budget."""

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
from kvrouter.text.token_lengths import TokenPieces, longest_token_chars, normal_forms, normalized_bytes


def read_json_object(path: Path) -> Mapping[str, object]:
    """Return the object in ``path``, empty when there is no such file; ``ConfigError`` for anything else."""
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
    """Return the text of a token that a configuration gives as a string or as ``{"content": …}``."""
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else None


EOS_FILES = ("generation_config.json", "config.json")


class Tokenizer:
    """One model's tokenizer. Safe to use from several threads at once; nothing in it changes."""

    def __init__(
        self,
        backend: Backend,
        *,
        eos_tokens: Iterable[str] = (),
        eos_ids: Iterable[int] = (),
        reads_specials: bool = True,
    ) -> None:
        """Take over ``backend``. ``eos_tokens`` that the vocabulary lacks are an error. Unless it
        ``reads_specials``, a special token that a completion's prompt spells out is text.
        """
        backend.no_truncation()
        backend.no_padding()
        self._backend = self._prompt_backend = backend
        if not reads_specials:
            self._prompt_backend = Backend.from_str(backend.to_str())
            self._prompt_backend.encode_special_tokens = True
        vocabulary = backend.get_vocab()
        added = backend.get_added_tokens_decoder()
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        """One more than the highest token id."""
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        """Ids that detokenizing leaves out."""
        self.eos_ids = frozenset(eos_ids) | {_id_of(vocabulary, token) for token in eos_tokens}
        """Ids after which the model has nothing more to say."""
        self.bos_ids = _ids_before_text(backend)
        """Ids that the post-processor puts before a text; usually one or none."""
        self.token_max_chars = longest_token_chars(backend)
        """How many characters of a text one token stands for at most; None where that has no bound."""
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
        backend = _backend_of(folder)
        eos_token = token_content(read_json_object(folder / "tokenizer_config.json").get("eos_token"))
        eos_ids: set[int] = set()
        for name in EOS_FILES:
            eos_ids.update(_as_ids(read_json_object(folder / name).get("eos_token_id")))
        return cls(
            backend,
            eos_tokens=[eos_token] if eos_token else [],
            eos_ids=eos_ids,
            reads_specials=not is_read_by_mistral(folder),
        )

    def encode(self, text: str) -> TokenBuffer:
        """Return the ids of ``text`` alone, for text that a chat template made. The GIL is free meanwhile.

        A special token written out in ``text`` becomes that special token, as in every engine.
        """
        return _encoded(self._backend, text)

    def encode_prompt(self, text: str) -> TokenBuffer:
        """Return the ids of a plain completion prompt: ``bos_ids``, then those of ``text``."""
        ids = _encoded(self._prompt_backend, text)
        return self.bos_ids + ids if self.bos_ids else ids

    def normalized_bytes(self, text: str) -> int:
        """Return how many bytes of UTF-8 the normalizer makes of ``text``: what encoding takes memory for."""
        return normalized_bytes(text, self._normal_forms)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ``token_ids``; special and unknown ids have none; bad UTF-8 becomes U+FFFD."""
        return self._backend.decode(token_ids, skip_special_tokens=True)


def _encoded(backend: Backend, text: str) -> TokenBuffer:
    # The batch form is the only one that skips offsets: two thirds of the time of a plain encode.
    try:
        (encoding,) = backend.encode_batch_fast([text], add_special_tokens=False)
    except TypeError as error:
        raise InvalidRequest("the prompt is not text, or half a surrogate pair", param="prompt") from error
    return array("I", encoding.ids)


def _backend_of(folder: Path) -> Backend:
    path = folder / "tokenizer.json"
    if not path.exists() and other_formats(folder):
        return converted_backend(folder)
    if is_read_by_mistral(folder) and find_spec("transformers") is not None:
        return converted_backend(folder)  # the two may differ, and the engine takes this one
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the tokenizer {path}: {error.strerror}", param=str(path)) from error
    try:
        return Backend.from_buffer(content)
    except ValueError as error:
        raise ConfigError(f"{path} is not a tokenizer: {error}", param=str(path)) from error


def _as_ids(entry: object) -> list[int]:
    """Return the ids of an entry that is an id, a list of ids, or absent."""
    entries = entry if isinstance(entry, list) else [entry]
    return [each for each in entries if isinstance(each, int)]


def _id_of(vocabulary: Mapping[str, int], token: str) -> int:
    token_id = vocabulary.get(token)
    if token_id is None:
        raise ConfigError(f"the vocabulary has no end token {token!r}", param="eos_token")
    return token_id


def _ids_before_text(backend: Backend) -> TokenBuffer:
    """Return the ids that the post-processor adds in front; what it adds behind would end the prompt."""
    plain = backend.encode("a", add_special_tokens=False).ids
    processed = backend.encode("a", add_special_tokens=True).ids
    start = next((at for at in range(len(processed)) if processed[at : at + len(plain)] == plain), 0)
    return array("I", processed[:start])


OFF_LOOP_CHARS = 8_192
"""About one millisecond of encoding; a hop to a thread and back costs a tenth of that."""

TOKEN_CHARS_UNKNOWN = 128
"""What a token is counted on to hold at most, where it could hold any number of characters."""

BYTES_PER_BYTE = 512
"""What encoding holds for each byte of normalized text: 140 to 190 of prose, code or one letter again and
again, 330 to 460 where each character is a token and a word of its own, by the kind of tokenizer.
"""

TRIMMED_BYTES = 64 * 1024 * 1024
"""After an encoding of this size memory goes back to the system: much of it stays with the allocator else."""

_COUNTED_ON_LOOP_CHARS = 16 * 1024

T = TypeVar("T")
R = TypeVar("R")


TOKEN_TEXT_BYTES = 4
"""The text of a token, on the average of English prose and code."""


def utf8_bytes(text: str) -> int:
    """Return the bytes of UTF-8 that a text has, half surrogate pairs too."""
    return len(text.encode("utf-8", "surrogatepass"))


class EncodePoolFull(Unavailable):
    """More long prompts wait to be tokenized than may, or one waited too long."""

    code = "encode_pool_full"


class PromptOverBudget(BodyTooLarge):
    """To tokenize this prompt alone would take more memory than all may."""

    code = "prompt_over_budget"


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeLimits:
    """What tokenizing may hold, and how long prompts wait for it."""

    off_loop_chars: int = OFF_LOOP_CHARS
    """Longer prompts are encoded in a thread."""
    bytes_max: int = 512 * 1024 * 1024
    """The memory of all encodings that run, counted as ``BYTES_PER_BYTE``."""
    waiting_max: int = 256
    """Prompts that wait for a thread or for memory."""
    wait_s: float = 10.0
    """How long one waits."""
    token_max_chars: int | None = None
    """The characters of one token at most; None: as the vocabulary says."""


class EncodePool:
    """A few threads that encode long prompts; shared by all models of a process.

    What runs is within the budget; what comes then waits in one line, so that the largest comes to its turn.
    """

    def __init__(self, limits: EncodeLimits | None = None, *, threads: int = 2) -> None:
        self.limits = EncodeLimits() if limits is None else limits
        self.held_bytes = 0
        """What encodings that run are counted to hold."""
        self._free_threads = threads
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="kvrouter-encode")

    def leaves_loop(self, chars: int) -> bool:
        """Whether a prompt of so many characters is encoded in a thread."""
        return chars > self.limits.off_loop_chars

    @property
    def text_max_bytes(self) -> int:
        """How long a text may be that can be encoded within the budget, in UTF-8."""
        return self.limits.bytes_max // BYTES_PER_BYTE

    @staticmethod
    def needed_bytes(text_bytes: int) -> int:
        """Return the memory that encoding a text is counted to take."""
        return BYTES_PER_BYTE * text_bytes

    def fits(self, text: str) -> str:
        """Return as much of the beginning of ``text`` as can be encoded within the budget."""
        return text[: self.text_max_bytes // _char_bytes_max(text)]

    def refuse_over_budget(self, text_bytes: int, *, field: str, bytes_max: int | None = None) -> None:
        """Raise PromptOverBudget, which names the field, for a text of more bytes of UTF-8 than can be
        encoded within the budget, or than ``bytes_max`` if that is more.
        """
        most_bytes = max(self.text_max_bytes, bytes_max or 0)
        if text_bytes > most_bytes:
            raise PromptOverBudget(
                f"{field}: {text_bytes} bytes of text, and at most {most_bytes} are tokenized: all prompts "
                f"together may take {self.limits.bytes_max} bytes of memory, {BYTES_PER_BYTE} for each "
                "(KVROUTER_TOKENIZE_MAX_BYTES)",
                param=field,
            )

    async def encode(
        self,
        encode: Callable[[str], TokenBuffer],
        text: str,
        *,
        field: str,
        count_bytes: Callable[[str], int] = utf8_bytes,
    ) -> TokenBuffer:
        """Return ``encode(text)``; ``field`` is where the text came from, and ``count_bytes`` says how many
        bytes of text that is not ASCII the tokenizer's normalizer makes.

        Raises PromptOverBudget, which names the field, for a text that can never be encoded here, and
        EncodePoolFull when too many wait, or it waited too long. A caller that is cancelled gives its place
        up; encoding that has begun ends unheard, and holds its memory until then.
        """
        if not self.leaves_loop(len(text)):
            return encode(text)
        text_bytes = await self._count(count_bytes, text)
        self.refuse_over_budget(text_bytes, field=field)
        need_bytes = self.needed_bytes(text_bytes)
        return await self.run(partial(_then_trim, encode, need_bytes), text, need_bytes=need_bytes)

    async def run(self, work: Callable[[T], R], what: T, *, need_bytes: int = 0) -> R:
        """Return ``work(what)``, done in a thread once one is free and the memory that it needs."""
        await self._admit(need_bytes)
        try:
            done = self._threads.submit(work, what)
        except BaseException:
            self._release(need_bytes)
            raise
        loop = asyncio.get_running_loop()
        done.add_done_callback(partial(self._release_soon, loop, need_bytes))
        return await asyncio.wrap_future(done)

    def close(self) -> None:
        """Take no more prompts and end the threads once what they hold is encoded."""
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
                self._let_in()
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
        with suppress(RuntimeError):  # the loop ended first, and nobody waits any more
            loop.call_soon_threadsafe(self._release, need_bytes)

    def _release(self, need_bytes: int) -> None:
        self._free_threads += 1
        self.held_bytes -= need_bytes
        self._let_in()

    def _let_in(self) -> None:
        while self._waiting and self._has_room(self._waiting[0][0]):
            need_bytes, turn = self._waiting.popleft()
            if not turn.done():
                self._take(need_bytes)
                turn.set_result(None)


def _char_bytes_max(text: str) -> int:
    """How many bytes of UTF-8 the widest character of a text may have, by what the text is stored as."""
    if text.isascii():
        return 1
    return 2 if sys.getsizeof(text) < 2 * len(text) else 4


def _then_trim(encode: Callable[[str], TokenBuffer], need_bytes: int, text: str) -> TokenBuffer:
    try:
        return encode(text)
    finally:
        if need_bytes >= TRIMMED_BYTES:
            allocator.trim()

"""One model's text: tokenizer, template, limits, detokenizer and stop strings."""

import codecs
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Protocol, TypeVar

from kvrouter.core.errors import ConfigError, ContextLengthExceeded, InvalidRequest
from kvrouter.core.requests import TokenBuffer
from kvrouter.text.chat import ChatTemplate, text_chars
from kvrouter.text.converted import TEKKEN
from kvrouter.text.prompts.fields import Prompt
from kvrouter.text.source import MOCK_FOLDER
from kvrouter.text.template_budget import CPU_S_MAX, CPU_S_MAX_ON_LOOP
from kvrouter.text.token_lengths import TokenPieces
from kvrouter.text.tokenizer import TOKEN_CHARS_UNKNOWN, EncodePool, Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
HELD_TOKENS_MAX = 16
"""The most tokens held back for an incomplete character, which has at most four bytes."""


class Detokenizer(Protocol):
    """Turns one stream of token ids into text."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that is now certain; bytes of an unfinished character are held back."""
        ...

    def finish(self) -> str:
        """Return the held-back text, with U+FFFD for incomplete characters."""
        ...


def make_detokenizer(tokenizer: Tokenizer, *, context: Sequence[int] = ()) -> Detokenizer:
    """Return a detokenizer for the ids after ``context``, whose text was delivered before.

    A resumed stream passes the ids that it has already delivered as ``context``.
    """
    if tokenizer.pieces is not None:
        return ByteLevelDetokenizer(tokenizer.pieces, context=context)
    return WindowDetokenizer(tokenizer, context=context)


class ByteLevelDetokenizer:
    """Joins the texts of tokens; its state is at most three bytes of an incomplete character."""

    __slots__ = ("_held", "_raw", "_texts")

    def __init__(self, pieces: TokenPieces, *, context: Sequence[int] = ()) -> None:
        self._texts, self._raw = pieces
        self._held = b""
        if context:
            self.push(context)

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that is now certain."""
        if not self._held:
            try:
                return "".join(map(self._texts.__getitem__, token_ids))
            except KeyError:
                # Part of a character, or an unknown id: decode the bytes.
                pass
        raw = self._raw
        pending = self._held + b"".join([raw.get(token_id, b"") for token_id in token_ids])
        text, used_bytes = codecs.utf_8_decode(pending, "replace", False)
        self._held = pending[used_bytes:]
        return text

    def finish(self) -> str:
        """Return the held-back bytes as text."""
        text = self._held.decode(errors="replace")
        self._held = b""
        return text


class WindowDetokenizer:
    """Decodes a window of the newest ids, and returns the text that the last ids added to it."""

    __slots__ = ("_base_chars", "_context", "_held", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, *, context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []
        self._base_chars = 0
        self._held: list[int] = []
        # Push it from the start: a window that begins inside a character would corrupt the text.
        self.push(context)

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that is now certain."""
        # One by one, to find every end of a character.
        return "".join([self._push_one(token_id) for token_id in token_ids])

    def finish(self) -> str:
        """Return the text of the held-back ids."""
        return self._deliver(self._tokenizer.decode(self._context + self._held))

    def _push_one(self, token_id: int) -> str:
        self._held.append(token_id)
        text = self._tokenizer.decode(self._context + self._held)
        if len(self._held) < HELD_TOKENS_MAX and (
            text.endswith(REPLACEMENT) or len(text) <= self._base_chars
        ):
            return ""
        return self._deliver(text)

    def _deliver(self, text: str) -> str:
        new = text[self._base_chars :]
        chars = len(self._tokenizer.decode(self._held))
        if chars:
            # Ids without text (special ones) are no context: the decoder would strip the next space.
            self._context = self._held
            self._base_chars = chars
        self._held = []
        return new


STOPS_MAX = 4
STOP_CHARS_MAX = 256


def stops_fit(stops: Sequence[str]) -> bool:
    """Whether a :class:`StopMatcher` accepts these stop strings."""
    return len(stops) <= STOPS_MAX and all(0 < len(stop) <= STOP_CHARS_MAX for stop in stops)


class StopMatcher:
    """Finds stop strings in one stream. It holds back text that may be the beginning of one."""

    __slots__ = ("_held", "_hold_chars", "_openers", "_prefixes", "_stops", "stopped")

    def __init__(self, stops: Sequence[str]) -> None:
        """Take up to ``STOPS_MAX`` strings of 1 to ``STOP_CHARS_MAX`` characters. Raises InvalidRequest."""
        if len(stops) > STOPS_MAX:
            raise InvalidRequest(f"stop: at most {STOPS_MAX} strings, not {len(stops)}", param="stop")
        for stop in stops:
            if not 0 < len(stop) <= STOP_CHARS_MAX:
                raise InvalidRequest(
                    f"stop: a string has 1 to {STOP_CHARS_MAX} characters, not {len(stop)}", param="stop"
                )
        self._openers: re.Pattern[str] | None = None
        self._held = ""
        self.stopped: str | None = None
        """The stop string that ended the stream; None before that."""
        if not stops:
            return
        # The longest first: of stops with the same end, the one that starts first wins.
        self._stops = sorted(set(stops), key=lambda stop: (-len(stop), stop))
        self._prefixes = frozenset(stop[:size] for stop in stops for size in range(1, len(stop)))
        self._openers = re.compile("[" + re.escape("".join({stop[0] for stop in stops})) + "]")
        self._hold_chars = len(self._stops[0]) - 1

    @property
    def is_idle(self) -> bool:
        """Whether there are no stop strings, so that no text is held back."""
        return self._openers is None

    def push(self, text: str) -> tuple[str, str | None]:
        """Return the text that can be delivered and the stop string that was found, or None."""
        if self._openers is None:
            return text, None
        if self.stopped is not None:
            return "", self.stopped
        pending = self._held + text
        if self._openers.search(pending) is None:
            return pending, None
        start = self._find(pending)
        if start is not None:
            self._held = ""
            return pending[:start], self.stopped
        keep_from = self._hold_from(pending)
        self._held = pending[keep_from:]
        return pending[:keep_from], None

    def finish(self) -> str:
        """Return the held-back text of a stream that ended without a stop string."""
        held, self._held = self._held, ""
        return held

    def _find(self, pending: str) -> int | None:
        """Set ``stopped`` to the stop string that ends first and return its start; None without one."""
        best_end = len(pending) + 1
        best_start = None
        for stop in self._stops:
            start = pending.find(stop, 0, best_end - 1)
            if start >= 0:
                best_start, best_end, self.stopped = start, start + len(stop), stop
        return best_start

    def _hold_from(self, pending: str) -> int:
        """Return the start of the longest suffix of ``pending`` that begins a stop string."""
        if self._openers is not None:
            for opener in self._openers.finditer(pending, max(0, len(pending) - self._hold_chars)):
                if pending[opener.start() :] in self._prefixes:
                    return opener.start()
        return len(pending)


class AnswerText:
    """Turns an answer's tokens into text, up to a stop string."""

    __slots__ = ("_detokenizer", "_matcher", "stopped")

    def __init__(self, detokenizer: Detokenizer, matcher: StopMatcher) -> None:
        self._detokenizer = detokenizer
        self._matcher = matcher
        self.stopped = False
        """Whether a stop string ended the answer."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens and return the text that is now certain; a stop string in it sets ``stopped``."""
        text, stopped = self._matcher.push(self._detokenizer.push(token_ids))
        self.stopped = self.stopped or stopped is not None
        return text

    def finish(self) -> str:
        """Return the held-back text after the last token."""
        text, stopped = self._matcher.push(self._detokenizer.finish())
        if stopped is None:
            return text + self._matcher.finish()
        self.stopped = True
        return text


FIRST_WORD_ID = 256


@cache
def mock_words() -> tuple[str, ...]:
    """Return the words of the mock tokenizer, all different.

    A text ``"".join(" " + word for …)`` of n words encodes into exactly n tokens in any position: at the
    start, after a newline, a special token or punctuation. The i-th word, with its space, is the token
    ``FIRST_WORD_ID + i``.
    """
    return tuple((MOCK_FOLDER / "words.txt").read_text(encoding="utf-8").split())


MOCK_CONTEXT_TOKENS = 131_072

RENDERED_ANYWAY_CHARS = 1_000_000
"""Messages up to this length are rendered even for a short context."""


_Chat = TypeVar("_Chat")


@dataclass(frozen=True, kw_only=True)
class TextModel:
    """One model's tokenizer, chat template and context length; ``pool`` is shared, its owner closes it."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    context_length_tokens: int
    pool: EncodePool
    unread: str | None = None
    """Why the model's chats cannot be rendered; None if they can, or if it has no template."""

    @property
    def why_by_load(self) -> str | None:
        """Why the model's chats are routed by load, as known at load time; None if they are not."""
        if self.unread is not None or self.template is None or self.template.fault is None:
            return self.unread
        return f"chats cannot be read here: {self.template.fault}"

    @cached_property
    def prompt_max_chars(self) -> int:
        """The most characters of a text whose tokens can fit into the context."""
        per_token = self.pool.limits.token_max_chars or self.tokenizer.token_max_chars or TOKEN_CHARS_UNKNOWN
        return per_token * self.context_length_tokens

    @classmethod
    def load(
        cls, folder: Path, *, context_length_tokens: int, pool: EncodePool, needs_template: bool = True
    ) -> "TextModel":
        """Read a model's folder, some seconds for a large vocabulary. Raises ``ConfigError``; for an
        invalid chat template only if ``needs_template``.
        """
        if context_length_tokens < 1:
            raise ConfigError(
                f"the context length is at least 1 token, not {context_length_tokens}", param="context_length"
            )
        tokenizer, template, unread = Tokenizer.from_folder(folder), None, None
        try:
            template = ChatTemplate.from_folder(folder)
        except (ConfigError, OSError, ValueError) as error:
            if needs_template:
                raise
            unread = f"chats cannot be read here: {error}"
        if template is None and unread is None and (folder / TEKKEN).is_file():
            unread = "chats cannot be read here: it has no chat template"
        return cls(
            tokenizer=tokenizer,
            template=template,
            context_length_tokens=context_length_tokens,
            pool=pool,
            unread=unread,
        )

    @classmethod
    def load_mock(
        cls, *, context_length_tokens: int = MOCK_CONTEXT_TOKENS, pool: EncodePool | None = None
    ) -> "TextModel":
        """Read the mock model in the package."""
        return cls.load(MOCK_FOLDER, context_length_tokens=context_length_tokens, pool=pool or EncodePool())

    @cached_property
    def chat_max_chars(self) -> int:
        """The most characters of a chat's messages: a template may drop half of them, such as earlier
        reasoning.
        """
        return max(2 * self.prompt_max_chars, RENDERED_ANYWAY_CHARS)

    def refuse_chat_size(self, chars: int, text_bytes: int) -> None:
        """Raise ContextLengthExceeded or PromptOverBudget for messages that are too long for any rendering,
        by their size alone.
        """
        if chars > self.chat_max_chars:
            raise self._too_long(chars, "messages")
        cost = self.tokenizer.encode_cost(chars)
        most_bytes = max(2 * self.pool.text_max_bytes(cost), RENDERED_ANYWAY_CHARS)
        self.pool.refuse_over_budget(text_bytes, cost, field="messages", bytes_max=most_bytes)

    def refuse_prompt_size(self, chars: int, text_bytes: int) -> None:
        """Raise ContextLengthExceeded or PromptOverBudget for a too long prompt of a completion, by its size
        alone.
        """
        if chars > self.prompt_max_chars:
            raise self._too_long(chars, "prompt")
        cost = self.tokenizer.encode_cost(chars)
        if self.pool.leaves_loop(chars, cost):
            self.pool.refuse_over_budget(text_bytes, cost, field="prompt")

    def prepare_chat(self, messages: Sequence[Mapping[str, object]], *, cpu_s_max: float = CPU_S_MAX) -> str:
        """Return the prompt text of a chat, rendered within ``cpu_s_max`` seconds of processor time.

        Raises InvalidRequest that names the field, and TemplateOverBounds.
        """
        return self.chat_template.render(messages, cpu_s_max=cpu_s_max)

    @property
    def chat_template(self) -> ChatTemplate:
        """The template; raises InvalidRequest for a model without one."""
        if self.template is None:
            raise InvalidRequest("messages: this model has no chat template", param="messages")
        return self.template

    async def encode_chat(self, messages: Sequence[Mapping[str, object]]) -> TokenBuffer:
        """Return the ids of a chat; its template writes the special tokens. Raises as ``prepare_chat`` does,
        and ContextLengthExceeded for a text that is longer than the context can hold.

        A long chat is also rendered in a thread: for many short messages the template takes as long as the
        tokenizer.
        """
        return await self._encoded_chat(self.prepare_chat, messages, text_chars(messages))

    async def encode_made(self, prompt: Prompt) -> TokenBuffer:
        """Return the ids of a prompt in an engine's form; raise as ``encode_chat`` does."""
        chars = text_chars(prompt.messages) + text_chars(prompt.tools or ())
        return await self._encoded_chat(self.chat_template.render_prompt, prompt, chars)

    async def _encoded_chat(self, render: Callable[..., str], chat: _Chat, chars: int) -> TokenBuffer:
        if chars > self.chat_max_chars:
            raise self._too_long(chars, "messages")
        if self.pool.leaves_loop(chars, self.tokenizer.encode_cost(chars)):
            text = await self.pool.run(partial(render, cpu_s_max=CPU_S_MAX), chat)
        else:
            text = render(chat, cpu_s_max=CPU_S_MAX_ON_LOOP)
        return await self._encoded(self.tokenizer.encode, text, "messages")

    async def encode_prompt(self, text: str) -> TokenBuffer:
        """Return the ids of a completion's prompt, after those that the post-processor puts first.

        Raises ContextLengthExceeded for a text that is longer than the context can hold.
        """
        return await self._encoded(self.tokenizer.encode_prompt, text, "prompt")

    async def encode_beginning(self, text: str) -> TokenBuffer:
        """Return the ids of the longest beginning of ``text`` that fits into the context and the budget."""
        text = text[: self.prompt_max_chars]
        text = self.pool.fits(text, self.tokenizer.encode_cost(len(text)))
        return await self._encoded(self.tokenizer.encode_prompt, text, "prompt")

    async def _encoded(self, encode: Callable[[str], TokenBuffer], text: str, field: str) -> TokenBuffer:
        if len(text) > self.prompt_max_chars:
            raise self._too_long(len(text), field)
        cost, count_bytes = self.tokenizer.encode_cost(len(text)), self.tokenizer.normalized_bytes
        return await self.pool.encode(encode, text, field=field, cost=cost, count_bytes=count_bytes)

    def _too_long(self, chars: int, field: str) -> ContextLengthExceeded:
        return ContextLengthExceeded(
            f"{field}: {chars} characters are more than {self.context_length_tokens} tokens, the model's "
            f"context, can hold: those are at most {self.prompt_max_chars} (KVROUTER_TOKEN_MAX_CHARS)",
            param=field,
        )

    def detokenizer(self, *, context: Sequence[int] = ()) -> Detokenizer:
        """Return a detokenizer for the ids that follow ``context``."""
        return make_detokenizer(self.tokenizer, context=context)

"""The text side of one model: tokenizer, template, limits, and the detokenizer of its answers."""

import codecs
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
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
"""A character has at most four bytes; what is broken after so many tokens is broken for good."""


class Detokenizer(Protocol):
    """One stream of token ids."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that is now certain; bytes of an unfinished character are held back."""
        ...

    def finish(self) -> str:
        """Return what was held back, with U+FFFD for bytes that never became a character."""
        ...


def make_detokenizer(tokenizer: Tokenizer, *, context: Sequence[int] = ()) -> Detokenizer:
    """Return a detokenizer for the ids that follow ``context``, whose own text was given out before.

    A stream that is resumed passes the ids that it has already delivered.
    """
    if tokenizer.pieces is not None:
        return ByteLevelDetokenizer(tokenizer.pieces, context=context)
    return WindowDetokenizer(tokenizer, context=context)


class ByteLevelDetokenizer:
    """Joins the pieces of tokens; a decoder's state is at most three bytes."""

    __slots__ = ("_held", "_raw", "_whole")

    def __init__(self, pieces: TokenPieces, *, context: Sequence[int] = ()) -> None:
        self._whole, self._raw = pieces
        self._held = b""
        if context:
            self.push(context)

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that is now certain."""
        if not self._held:
            try:
                return "".join(map(self._whole.__getitem__, token_ids))
            except KeyError:
                # Part of a character, or an id that means nothing: the bytes decide.
                pass
        raw = self._raw
        pending = self._held + b"".join([raw.get(token_id, b"") for token_id in token_ids])
        text, used_bytes = codecs.utf_8_decode(pending, "replace", False)
        self._held = pending[used_bytes:]
        return text

    def finish(self) -> str:
        """Return what was held back."""
        text = self._held.decode(errors="replace")
        self._held = b""
        return text


class WindowDetokenizer:
    """Decodes the ids since the last text but one, and gives out what the newest ids added to it."""

    __slots__ = ("_base_chars", "_context", "_held", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, *, context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []
        self._base_chars = 0
        self._held: list[int] = []
        # From the start: a window that began inside a character would spoil what follows.
        self.push(context)

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that is now certain."""
        # One by one: only so does every end of a character show.
        return "".join([self._push_one(token_id) for token_id in token_ids])

    def finish(self) -> str:
        """Return what was held back."""
        return self._give_out(self._tokenizer.decode(self._context + self._held))

    def _push_one(self, token_id: int) -> str:
        self._held.append(token_id)
        text = self._tokenizer.decode(self._context + self._held)
        if len(self._held) < HELD_TOKENS_MAX and (
            text.endswith(REPLACEMENT) or len(text) <= self._base_chars
        ):
            return ""
        return self._give_out(text)

    def _give_out(self, text: str) -> str:
        new = text[self._base_chars :]
        chars = len(self._tokenizer.decode(self._held))
        if chars:
            # Ids without text (special ones) make no context: a decoder would strip the space that follows.
            self._context = self._held
            self._base_chars = chars
        self._held = []
        return new


STOPS_MAX = 4
STOP_CHARS_MAX = 256


def stops_fit(stops: Sequence[str]) -> bool:
    """Whether a :class:`StopMatcher` takes these."""
    return len(stops) <= STOPS_MAX and all(0 < len(stop) <= STOP_CHARS_MAX for stop in stops)


class StopMatcher:
    """Watches one stream. Text that may still turn out to be a stop string is held back."""

    __slots__ = ("_held", "_hold_chars", "_openers", "_prefixes", "_stops", "stopped")

    def __init__(self, stops: Sequence[str]) -> None:
        """Take up to ``STOPS_MAX`` strings of 1 to ``STOP_CHARS_MAX`` characters, else ``InvalidRequest``."""
        if len(stops) > STOPS_MAX:
            raise InvalidRequest(f"stop: at most {STOPS_MAX} strings, not {len(stops)}", param="stop")
        for stop in stops:
            if not 0 < len(stop) <= STOP_CHARS_MAX:
                raise InvalidRequest(
                    f"stop: a string has 1 to {STOP_CHARS_MAX} characters, not {len(stop)}", param="stop"
                )
        # The longest first: of equal ends, the earliest start wins.
        self._stops = sorted(set(stops), key=lambda stop: (-len(stop), stop))
        self._prefixes = frozenset(stop[:size] for stop in stops for size in range(1, len(stop)))
        self._openers = (
            re.compile("[" + re.escape("".join({stop[0] for stop in stops})) + "]") if stops else None
        )
        self._hold_chars = len(self._stops[0]) - 1 if stops else 0
        self._held = ""
        self.stopped: str | None = None
        """The stop string that ended the stream."""

    @property
    def is_idle(self) -> bool:
        """Whether there is no stop string, so that all text may be given out."""
        return self._openers is None

    def push(self, text: str) -> tuple[str, str | None]:
        """Return the text that may be given out and, once it has come, the stop string."""
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
        """Return what was held back: the stream has ended without a stop string."""
        held, self._held = self._held, ""
        return held

    def _find(self, pending: str) -> int | None:
        """Note the stop string that is complete first and return where it starts."""
        best_end = len(pending) + 1
        best_start = None
        for stop in self._stops:
            start = pending.find(stop, 0, best_end - 1)
            if start >= 0:
                best_start, best_end, self.stopped = start, start + len(stop), stop
        return best_start

    def _hold_from(self, pending: str) -> int:
        """Return where the longest end of ``pending`` that begins a stop string starts."""
        if self._openers is not None:
            for opener in self._openers.finditer(pending, max(0, len(pending) - self._hold_chars)):
                if pending[opener.start() :] in self._prefixes:
                    return opener.start()
        return len(pending)


class AnswerText:
    """An answer's text: what is certain, piece by piece, and nothing after a stop string."""

    __slots__ = ("_detokenizer", "_matcher", "stopped")

    def __init__(self, detokenizer: Detokenizer, matcher: StopMatcher) -> None:
        self._detokenizer = detokenizer
        self._matcher = matcher
        self.stopped = False
        """Whether a stop string ended the answer: nothing after it is given out."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that is certain with these tokens; a stop string in it sets ``stopped``."""
        text, stopped = self._matcher.push(self._detokenizer.push(token_ids))
        self.stopped = self.stopped or stopped is not None
        return text

    def finish(self) -> str:
        """Return what was held back: no more tokens come."""
        text, stopped = self._matcher.push(self._detokenizer.finish())
        if stopped is None:
            return text + self._matcher.finish()
        self.stopped = True
        return text


FIRST_WORD_ID = 256


@cache
def mock_words() -> tuple[str, ...]:
    """Return the words, all different.

    Any text ``"".join(" " + word for …)`` of n of them encodes into exactly n tokens, wherever it stands:
    at the start, after a newline, a special token or punctuation. The i-th word, with its space, is the token
    ``FIRST_WORD_ID + i``.
    """
    return tuple((MOCK_FOLDER / "words.txt").read_text(encoding="utf-8").split())


MOCK_CONTEXT_TOKENS = 131_072

RENDERED_ANYWAY_CHARS = 1_000_000
"""So many characters of messages are rendered however short the context is."""


_Chat = TypeVar("_Chat")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextModel:
    """One model's tokenizer, chat template and context length; ``pool`` is shared and not closed here."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    context_length_tokens: int
    pool: EncodePool
    unread: str | None = None
    """Why its chats cannot be made into prompts here; None where they can, or where it has no template."""

    @property
    def why_by_load(self) -> str | None:
        """Why its chats are routed by load as far as is known before any came; None where they are not."""
        if self.unread is not None or self.template is None or self.template.fault is None:
            return self.unread
        return f"chats cannot be read here: {self.template.fault}"

    @property
    def prompt_max_chars(self) -> int:
        """How many characters a text may have whose tokens fit into the context."""
        per_token = self.pool.limits.token_max_chars or self.tokenizer.token_max_chars or TOKEN_CHARS_UNKNOWN
        return per_token * self.context_length_tokens

    @classmethod
    def load(
        cls, folder: Path, *, context_length_tokens: int, pool: EncodePool, needs_template: bool = True
    ) -> "TextModel":
        """Read a model's folder; a second for a large vocabulary. ``ConfigError`` says what is wrong; with
        the chat template nothing has to be right unless it is needed.
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
        """Read the model that ships with the package."""
        return cls.load(MOCK_FOLDER, context_length_tokens=context_length_tokens, pool=pool or EncodePool())

    @property
    def chat_max_chars(self) -> int:
        """How many characters the messages of a chat may have: a template may leave half of them out, such as
        what a model once thought.
        """
        return max(2 * self.prompt_max_chars, RENDERED_ANYWAY_CHARS)

    def refuse_chat_size(self, chars: int, text_bytes: int) -> None:
        """Raise for messages that are too long whatever the template makes of them, by their size alone:
        ContextLengthExceeded, or PromptOverBudget.
        """
        self._refuse_chars(chars, self.chat_max_chars, "messages")
        most_bytes = max(2 * self.pool.text_max_bytes, RENDERED_ANYWAY_CHARS)
        self.pool.refuse_over_budget(text_bytes, field="messages", bytes_max=most_bytes)

    def refuse_prompt_size(self, chars: int, text_bytes: int) -> None:
        """Raise for the prompt of a completion that is too long, by its size alone: ContextLengthExceeded, or
        PromptOverBudget.
        """
        self._refuse_chars(chars, self.prompt_max_chars, "prompt")
        if self.pool.leaves_loop(chars):
            self.pool.refuse_over_budget(text_bytes, field="prompt")

    def prepare_chat(self, messages: Sequence[Mapping[str, object]], *, cpu_s_max: float = CPU_S_MAX) -> str:
        """Return the prompt text of a chat, made within so much processor time.

        Raises InvalidRequest that names the field, and TemplateOverBounds.
        """
        return self.chat_template.render(messages, cpu_s_max=cpu_s_max)

    @property
    def chat_template(self) -> ChatTemplate:
        """The template; InvalidRequest where the model has none."""
        if self.template is None:
            raise InvalidRequest("messages: this model has no chat template", param="messages")
        return self.template

    async def encode_chat(self, messages: Sequence[Mapping[str, object]]) -> TokenBuffer:
        """Return the ids of a chat, whose special tokens the template writes; raise as ``prepare_chat`` does.

        A long chat is rendered in a thread, too: over many short messages the template takes as long as the
        tokenizer. Raises ContextLengthExceeded for a text that is longer than the context can hold.
        """
        return await self._encoded_chat(self.prepare_chat, messages, text_chars(messages))

    async def encode_made(self, prompt: Prompt) -> TokenBuffer:
        """Return the ids of a prompt as an engine makes it; raise as ``encode_chat`` does."""
        chars = text_chars(prompt.messages) + text_chars(prompt.tools or ())
        return await self._encoded_chat(self.chat_template.render_prompt, prompt, chars)

    async def _encoded_chat(self, render: Callable[..., str], chat: _Chat, chars: int) -> TokenBuffer:
        self._refuse_chars(chars, self.chat_max_chars, "messages")
        if self.pool.leaves_loop(chars):
            text = await self.pool.run(partial(render, cpu_s_max=CPU_S_MAX), chat)
        else:
            text = render(chat, cpu_s_max=CPU_S_MAX_ON_LOOP)
        return await self._encoded(self.tokenizer.encode, text, "messages")

    async def encode_prompt(self, text: str) -> TokenBuffer:
        """Return the ids of a completion's prompt, begun as the tokenizer's post-processor begins a text.

        Raises ContextLengthExceeded for a text that is longer than the context can hold.
        """
        return await self._encoded(self.tokenizer.encode_prompt, text, "prompt")

    async def encode_beginning(self, text: str) -> TokenBuffer:
        """Return the first ids of a prompt that may be too long, as many as can be had."""
        text = self.pool.fits(text[: self.prompt_max_chars])
        return await self._encoded(self.tokenizer.encode_prompt, text, "prompt")

    async def _encoded(self, encode: Callable[[str], TokenBuffer], text: str, field: str) -> TokenBuffer:
        self._refuse_chars(len(text), self.prompt_max_chars, field)
        count_bytes = self.tokenizer.normalized_bytes
        return await self.pool.encode(encode, text, field=field, count_bytes=count_bytes)

    def _refuse_chars(self, chars: int, chars_max: int, field: str) -> None:
        if chars > chars_max:
            raise ContextLengthExceeded(
                f"{field}: {chars} characters are more than {self.context_length_tokens} tokens, the model's "
                f"context, can hold: those are at most {self.prompt_max_chars} (KVROUTER_TOKEN_MAX_CHARS)",
                param=field,
            )

    def detokenizer(self, *, context: Sequence[int] = ()) -> Detokenizer:
        """Return a detokenizer for the ids that follow ``context``."""
        return make_detokenizer(self.tokenizer, context=context)

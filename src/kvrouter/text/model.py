"""The text side of one model: tokenizer, template, limits."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from kvrouter.core.errors import ConfigError, ContextLengthExceeded, InvalidRequest
from kvrouter.core.requests import TokenBuffer
from kvrouter.text.chat import ChatTemplate, text_chars
from kvrouter.text.detokenizer import Detokenizer, make_detokenizer
from kvrouter.text.template_budget import CPU_S_MAX, CPU_S_MAX_ON_LOOP
from kvrouter.text.tokenizer import TOKEN_CHARS_UNKNOWN, EncodePool, Tokenizer

MOCK_FOLDER = Path(__file__).parent / "data" / "mock"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TextModel:
    """One model's tokenizer, chat template and context length; ``pool`` is shared and not closed here."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    context_length_tokens: int
    pool: EncodePool

    @property
    def prompt_max_chars(self) -> int:
        """How many characters a text may have whose tokens fit into the context."""
        per_token = self.pool.limits.token_max_chars or self.tokenizer.token_max_chars or TOKEN_CHARS_UNKNOWN
        return per_token * self.context_length_tokens

    @classmethod
    def load(cls, folder: Path, *, context_length_tokens: int, pool: EncodePool) -> "TextModel":
        """Read a model's folder; a second for a large vocabulary. ``ConfigError`` says what is wrong."""
        if context_length_tokens < 1:
            raise ConfigError(
                f"the context length is at least 1 token, not {context_length_tokens}", param="context_length"
            )
        return cls(
            tokenizer=Tokenizer.from_folder(folder),
            template=ChatTemplate.from_folder(folder),
            context_length_tokens=context_length_tokens,
            pool=pool,
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

    def prepare_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[object] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, object] | None = None,
        cpu_s_max: float = CPU_S_MAX,
    ) -> str:
        """Return the prompt text of a chat, made within so much processor time.

        Raises InvalidRequest that names the field, and TemplateOverBounds.
        """
        if self.template is None:
            raise InvalidRequest("messages: this model has no chat template", param="messages")
        return self.template.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            template_kwargs=template_kwargs,
            cpu_s_max=cpu_s_max,
        )

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[object] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, object] | None = None,
    ) -> TokenBuffer:
        """Return the ids of a chat, whose special tokens the template writes; raise as ``prepare_chat`` does.

        A long chat is rendered in a thread, too: over many short messages the template takes as long as the
        tokenizer. Raises ContextLengthExceeded for a text that is longer than the context can hold.
        """
        render = partial(
            self.prepare_chat,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            template_kwargs=template_kwargs,
        )
        chars = text_chars(messages) + text_chars(tools or ())
        self._refuse_chars(chars, self.chat_max_chars, "messages")
        if self.pool.leaves_loop(chars):
            text = await self.pool.run(render, messages)
        else:
            text = render(messages, cpu_s_max=CPU_S_MAX_ON_LOOP)
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

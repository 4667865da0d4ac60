"""The conversations of a bench: their sizes, and their prompts as text.

Users of a group share a system prompt; each has a document of its own and asks about it several times. The
prompt of a turn begins with the whole prompt of the turn before it. Answers in a prompt are part of this
text, and not what an engine wrote, so that every arm gets the same prompts.
"""

from collections.abc import Iterator, Sequence
from math import ceil
from typing import NamedTuple

import numpy as np

from kvrouter.core.errors import ConfigError
from kvrouter.text.model import mock_words

USERS = 3
"""Conversations of a group."""

TURNS = 4
SHARED_PARTS, OWN_PARTS, TURN_PARTS = 8, 24, 2
"""How many of a prompt's parts the group's system prompt, the user's document, and each turn have."""

PARTS = SHARED_PARTS + OWN_PARTS + TURNS * TURN_PARTS
"""How many parts the prompt of a last turn has."""

ANSWER_TOKENS = 16
"""How many tokens each answer has."""

LONGEST_PROMPT_TOKENS = 4096
SHORTEST_PROMPT_TOKENS = 256
"""A last turn's prompt has at most the first by default. Slow engines get shorter ones, to the second."""

CONTEXT_SHARE = 0.8
"""The share of the context that a prompt may fill: the number of tokens of a word varies."""

FILLED_SHARE = 0.9
"""The share of all caches together that a round's conversations fill: more than one cache, less than all."""

CONVERSATIONS_MIN = 8
CONVERSATIONS_MAX = 1024

COMPUTED_SHARE = 0.5
"""A request's mean time over all arms and turns, as a share of the time of a prompt without cached tokens."""

ROUND_SHARE = 0.4
"""The share of the time that a first round may take, so that a second one follows."""

SALT_WORDS = 8
"""At the beginning of every prompt; they differ from arm to arm, from round to round and from run to run."""

_TEXT_SEED = 20_251
"""The same words in every run, but for the salt."""


class Caches(NamedTuple):
    """What a router says of its engines: ``number`` of KV caches, one of each rank that prefills, the tokens
    of the smallest one, the shortest context; None where it does not know.
    """

    number: int
    cache_tokens: int | None
    context_tokens: int | None
    block_size: int


class WorkloadSize(NamedTuple):
    """The sizes of one round of an arm. ``prompt_tokens`` is the length of a last turn's prompt."""

    conversations: int
    prompt_tokens: int

    @property
    def requests(self) -> int:
        """Every conversation has all turns."""
        return self.conversations * TURNS

    @property
    def groups(self) -> int:
        """The last one may have fewer users."""
        return -(-self.conversations // USERS)

    @property
    def total_prompt_tokens(self) -> int:
        """Of all prompts, cached or not."""
        per_conversation = sum(_parts_of(turn) for turn in range(TURNS)) * self.prompt_tokens / PARTS
        return round(self.conversations * per_conversation)

    @property
    def distinct_tokens(self) -> int:
        """Without repetitions: the tokens that a cache must hold to find all that can be found."""
        own = (PARTS - SHARED_PARTS) * self.conversations
        return round((own + SHARED_PARTS * self.groups) * self.prompt_tokens / PARTS)

    def possible_hit_rate(self, block_size: int) -> float:
        """Return the share of prompt tokens that an endless cache, shared by all engines, would find: whole
        blocks of the shared part in a first turn, and of the prompt of the turn before in the others.
        """
        shared = (self.conversations - self.groups) * self._whole_blocks(SHARED_PARTS, block_size)
        repeated = sum(self._whole_blocks(_parts_of(turn), block_size) for turn in range(TURNS - 1))
        return (shared + self.conversations * repeated) / self.total_prompt_tokens

    def _whole_blocks(self, parts: int, block_size: int) -> int:
        """Return the tokens of the whole blocks in so many parts."""
        tokens = round(parts * self.prompt_tokens / PARTS)
        return tokens - tokens % block_size


def longest_prompt(caches: Caches, wanted: int | None) -> int:
    """Return the length of a last turn's prompt, in tokens. Raises ConfigError for one that cannot be."""
    limits = [LONGEST_PROMPT_TOKENS if wanted is None else wanted]
    if caches.context_tokens is not None:
        limits.append(int((caches.context_tokens - ANSWER_TOKENS) * CONTEXT_SHARE))
    if wanted is None and caches.cache_tokens is not None:
        limits.append(_filled_tokens(caches.number, caches.cache_tokens) // CONVERSATIONS_MIN)
    longest, needed = min(limits), wanted or PARTS // TURN_PARTS
    if longest < needed:
        raise ConfigError(
            f"--prompt-tokens: must be at most {max(0, longest)}, not {needed}: a prompt may fill "
            f"{CONTEXT_SHARE:.0%} of a context, as words differ in tokens, less the {ANSWER_TOKENS} tokens "
            "of the answer",
            param="prompt-tokens",
        )
    return longest


def size_workload(
    caches: Caches, prompt_tokens: int, *, request_s: float, arms: int, seconds: float, is_fixed: bool
) -> WorkloadSize:
    """Return the sizes of a round: conversations fill the caches, where ``seconds`` allow it.

    ``request_s`` is the time of a prompt of this length without cached tokens, divided by how many run at
    once. Prompts become shorter where too few conversations would remain, unless their length ``is_fixed``.
    Raises ConfigError where a round of the fewest conversations takes longer than ``seconds``.
    """
    conversation_s = arms * TURNS * COMPUTED_SHARE * max(request_s, 1e-6)
    affordable = seconds * ROUND_SHARE / conversation_s
    if affordable < CONVERSATIONS_MIN and not is_fixed:
        shorter = int(prompt_tokens * affordable / CONVERSATIONS_MIN)
        shorter = min(prompt_tokens, max(SHORTEST_PROMPT_TOKENS, shorter))
        conversation_s *= shorter / prompt_tokens
        prompt_tokens = shorter
    least_s = CONVERSATIONS_MIN * conversation_s
    if least_s > seconds:
        raise ConfigError(
            f"--seconds: must be at least {ceil(least_s)}: that long a round of {CONVERSATIONS_MIN} "
            f"conversations with prompts up to {prompt_tokens:,} tokens takes on these engines",
            param="seconds",
        )
    fitting = CONVERSATIONS_MAX
    if caches.cache_tokens is not None:
        each = WorkloadSize(USERS, prompt_tokens).distinct_tokens / USERS
        fitting = int(_filled_tokens(caches.number, caches.cache_tokens) / each)
    number = min(CONVERSATIONS_MAX, int(affordable), fitting)
    return WorkloadSize(max(CONVERSATIONS_MIN, number), prompt_tokens)


def _filled_tokens(number: int, cache_tokens: int) -> int:
    return int(FILLED_SHARE * number * cache_tokens)


def _parts_of(turn: int) -> int:
    return SHARED_PARTS + OWN_PARTS + (turn + 1) * TURN_PARTS


class Turn(NamedTuple):
    """One request: a turn, from 0, of a conversation."""

    conversation: int
    turn: int


def turns_in_order(size: WorkloadSize, number: int) -> Sequence[Turn]:
    """Return the requests of round ``number``, in their order, which is the same for every arm: each turn of
    all conversations, shuffled. Unshuffled, round-robin might meet the same engine at every turn.
    """
    rng = np.random.default_rng((_TEXT_SEED, number))
    waves = [rng.permutation(size.conversations) for _ in range(TURNS)]
    return [Turn(int(conversation), turn) for turn, wave in enumerate(waves) for conversation in wave]


class Prompts(NamedTuple):
    """The prompts of one round of one arm. ``salt`` is different for each arm, round and run."""

    tokens_per_word: float
    size: WorkloadSize
    number: int
    salt: tuple[int, ...]

    def text(self, turn: Turn) -> str:
        """Return a prompt."""
        group = turn.conversation // USERS
        pieces = [
            self._drawn((3, *self.salt), SALT_WORDS),
            self._drawn((0, group), self._n_words(SHARED_PARTS) - SALT_WORDS),
            self._drawn((1, turn.conversation), self._n_words(OWN_PARTS)),
            *(
                self._drawn((2, turn.conversation, each), self._n_words(TURN_PARTS))
                for each in range(turn.turn + 1)
            ),
        ]
        return "".join(piece for words in pieces for piece in words)

    def _n_words(self, parts: int) -> int:
        return max(1, round(self.size.prompt_tokens * parts / PARTS / self.tokens_per_word))

    def _drawn(self, key: tuple[int, ...], n_words: int) -> Iterator[str]:
        words, rng = mock_words(), np.random.default_rng([_TEXT_SEED, self.number, *key])
        return (f" {words[at]}" for at in rng.integers(len(words), size=max(0, n_words)))

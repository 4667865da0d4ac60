"""The requests that calibrate the timing of a live engine, and how many of them run at once."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from kvrouter.core.errors import ConfigError

LONE_LEAST = 3
"""So many requests run alone, at least: a line through their times needs as many."""

FITTED_LEAST = 10
"""With fewer requests some of the loads would have one request or none."""

REQUESTS_MAX = 1_000
"""With more requests to fit to the fit takes hours, and is no better."""

CHECKED_LEAST = 5
"""Requests that are predicted, at least; else a third as many as are fitted to."""

PROMPT_SHORTEST = 32
"""Tokens of the shortest prompt: with fewer a step takes as long as with these."""

PROMPT_LONGEST = 16_384
"""Tokens of the longest prompt, however long the context is: the load should end within minutes."""

ANSWER_TOKENS = 64
"""Tokens of an answer; the mean of several steps is more exact than one."""

WARM_UP_TOKENS = 512
WARM_UP_ANSWER_TOKENS = 8
"""The prompt of a request that warms up, and its answer."""

CONTEXT_SHARE = 0.8
"""The share of a context that prompt and answer fill: a text's number of tokens is known later."""

CONTEXT_LEAST = 128
"""Tokens of a context in which prompts can differ in length."""

KV_SHARE = 0.5
"""The share of the KV blocks that requests of one load fill together, so that no request waits for blocks."""


class LoadRequest(NamedTuple):
    """One request: tokens of its prompt and of its answer."""

    prompt_tokens: int
    answer_tokens: int


class LoadPhase(NamedTuple):
    """Requests of which ``concurrency`` run at once: the next one is sent as one ends."""

    concurrency: int
    requests: tuple[LoadRequest, ...]


class EngineLoad(NamedTuple):
    """The load of an engine: the requests to fit to, then those to predict."""

    fitted: tuple[LoadPhase, ...]
    checked: LoadPhase

    @property
    def phases(self) -> tuple[LoadPhase, ...]:
        """All of it, in the order in which it is sent."""
        return (*self.fitted, self.checked)

    @property
    def warm_up(self) -> tuple[LoadRequest, ...]:
        """The requests before the measurement, which warm up the engine. They grow, so that the number of
        tokens in a text is known before one nearly fills the context.
        """
        longest = max(request.prompt_tokens for request in self.fitted[0].requests)
        middle = min(WARM_UP_TOKENS, max(1, longest // 4))
        return tuple(
            LoadRequest(n, WARM_UP_ANSWER_TOKENS) for n in (min(PROMPT_SHORTEST, middle), middle, longest)
        )

    @property
    def n_requests(self) -> int:
        """How many requests that is."""
        return sum(len(phase.requests) for phase in self.phases)


def engine_load(
    n_fitted: int, *, context_tokens: int, kv_tokens: int | None = None, max_num_seqs: int | None = None
) -> EngineLoad:
    """Return a load that shows each figure of a timing, with hardly any queueing.

    The first quarter of the ``n_fitted`` requests runs one at a time: these have the longest prompts, and no
    other request makes them wait. In the second quarter four run at once, in the others up to 32, with short
    prompts of which many fit into one step. ``context_tokens`` limits a request, ``kv_tokens`` and
    ``max_num_seqs`` all that run at once.

    Raises ConfigError for too few or too many requests, and for too short a context.
    """
    if n_fitted < FITTED_LEAST:
        raise ConfigError(
            f"requests: {n_fitted} are too few to measure an engine with; take {FITTED_LEAST} or more",
            param="requests",
        )
    if n_fitted > REQUESTS_MAX:
        raise ConfigError(
            f"requests: {n_fitted} are more than the {REQUESTS_MAX} that an engine is sent", param="requests"
        )
    if context_tokens < CONTEXT_LEAST:
        raise ConfigError(
            f"max_model_len: {context_tokens} tokens are too few to measure an engine with; "
            f"it takes {CONTEXT_LEAST}",
            param="max_model_len",
        )
    n_alone = max(LONE_LEAST, n_fitted // 4)
    n_some = n_fitted // 4
    n_many = n_fitted - n_alone - n_some
    n_checked = max(CHECKED_LEAST, n_fitted // 3)
    room = _Room(context_tokens, kv_tokens, max_num_seqs)
    return EngineLoad(
        (
            room.phase(n_alone, concurrency=1, longest=PROMPT_LONGEST),
            room.phase(n_some, concurrency=4, longest=2_048),
            room.phase(n_many, concurrency=32, longest=512),
        ),
        room.phase(n_checked, concurrency=8, longest=1_024),
    )


class _Room(NamedTuple):
    """The capacity of an engine."""

    context_tokens: int
    kv_tokens: int | None
    max_num_seqs: int | None

    def phase(self, n_requests: int, *, concurrency: int, longest: int) -> LoadPhase:
        """Return a phase with prompts that grow by equal factors up to ``longest``, in mixed order."""
        at_once = min(concurrency, n_requests, self.max_num_seqs or concurrency)
        most = int(CONTEXT_SHARE * self.context_tokens)
        if self.kv_tokens is not None:
            most = min(most, int(KV_SHARE * self.kv_tokens) // at_once)
        answer = min(ANSWER_TOKENS, max(2, most // 4))
        largest = max(1, min(longest, most - answer))
        lengths = np.geomspace(min(PROMPT_SHORTEST, largest), largest, n_requests)
        # Answers differ, so that requests which began together do not end together.
        answers = answer - answer * (np.arange(n_requests) % 3) // 4
        return LoadPhase(
            at_once,
            tuple(
                LoadRequest(round(float(lengths[at])), int(answers[at])) for at in _from_both_ends(n_requests)
            ),
        )


def _from_both_ends(n: int) -> Iterator[int]:
    """Yield 0, n - 1, 1, n - 2, …: what changes with time should not look as if it came with length."""
    for at in range(n):
        yield n - 1 - at // 2 if at % 2 else at // 2

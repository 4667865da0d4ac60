"""One leg inside an engine: what it says, the KV it holds, and its output that was not read yet."""

from array import array
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import NamedTuple, NewType, Protocol

from kvrouter.core.events import HashColumn, count_hashes
from kvrouter.core.hashing import block_hashes, hash_seed
from kvrouter.core.ids import RequestId, WorkerId
from kvrouter.core.requests import EngineChunk, EngineRequest, FinishReason, KvLoss, KvTransferParams, Leg
from kvrouter.mock.config import MockConfig
from kvrouter.mock.paged_kv import TableId
from kvrouter.mock.tokens import TokenModel

SequenceKey = NewType("SequenceKey", str)
"""What an engine calls one leg of one attempt."""

UNLIMITED_CREDIT = 1 << 62


def sequence_key(request: EngineRequest) -> SequenceKey:
    """Return the key of ``request``: both legs of one attempt may be at one engine."""
    return SequenceKey(f"{request.engine_key}/{request.leg}")


class LegStamps(NamedTuple):
    """One leg that generated all of its tokens, by its engine's clock: when it came, and when its first and
    its last token were generated. ``cached_tokens`` are those of its prompt that the engine had.
    """

    worker_id: WorkerId
    request_id: RequestId
    attempt: int
    leg: Leg
    came_s: float
    first_s: float
    last_s: float
    output_tokens: int
    cached_tokens: int


LegSink = Callable[[LegStamps], None]


class SequenceState(Enum):
    """Where a sequence is. Only ``RUNNING`` ones take part in steps."""

    WAITING = auto()
    """For memory, or for a seat."""
    RECEIVING = auto()
    """It has memory, and waits for KV from its prefill engine."""
    READY = auto()
    """Its KV arrived; it waits for a seat."""
    RUNNING = auto()
    PARKED = auto()
    """It gave up its memory while its reader was slow; it waits for credit."""
    ENDED = auto()


class Content(Protocol):
    """What a leg says: its prompt, and then its output, which no one but the content can know."""

    prompt_tokens: int
    """How many tokens the prompt has, those included that were generated elsewhere before."""

    block_hashes: HashColumn
    """The hashes of the leading full blocks, as far as they were asked for."""

    stop_token_ids: frozenset[int]
    """What ends the output before its length does."""

    def hash_blocks(self, n_blocks: int) -> None:
        """Make sure that the first ``n_blocks`` blocks, all of them full, have their hashes."""

    def next_tokens(self, n_tokens: int) -> Sequence[int]:
        """Generate so many tokens."""


class TokenContent:
    """A leg with tokens, which the mock model goes on with. It draws about a block ahead: tokens depend on
    nothing but those before them.
    """

    __slots__ = (
        "_block_size",
        "_chain",
        "_drawn",
        "_drawn_used",
        "_eos_from",
        "_left",
        "_model",
        "_seed",
        "_tokens",
        "block_hashes",
        "prompt_tokens",
        "stop_token_ids",
    )

    def __init__(self, request: EngineRequest, config: MockConfig, model: TokenModel) -> None:
        sampling = request.sampling
        self.prompt_tokens = len(request.token_ids)
        self._tokens = array("I", request.token_ids)
        self._seed = hash_seed(lora_name=request.lora_name, cache_namespace=request.cache_namespace)
        self._block_size = config.block_size
        self.block_hashes = block_hashes(self._tokens, block_size=config.block_size, seed=self._seed)
        self.stop_token_ids = frozenset(sampling.stop_token_ids)
        self._eos_from: int | None = None
        if config.eos_every is not None and not sampling.ignore_eos:
            self.stop_token_ids |= {config.eos_token_id}
            self._eos_from = sampling.min_tokens
        self._left = sampling.max_tokens
        self._model = model
        self._chain = model.state(request.token_ids, sampling)
        self._drawn: list[int] = []
        self._drawn_used = 0

    def hash_blocks(self, n_blocks: int) -> None:
        """Make sure that the first ``n_blocks`` blocks have their hashes."""
        known, block_size = count_hashes(self.block_hashes), self._block_size
        if n_blocks > known:
            tokens = self._tokens[known * block_size : n_blocks * block_size]
            self.block_hashes += block_hashes(tokens, block_size=block_size, seed=self._seed)

    def next_tokens(self, n_tokens: int) -> Sequence[int]:
        """Generate so many tokens."""
        token_ids: list[int] = []
        while len(token_ids) < n_tokens:
            if self._drawn_used == len(self._drawn):
                self._draw()
            wanted = self._drawn_used + n_tokens - len(token_ids)
            taken = self._drawn[self._drawn_used : wanted]
            self._drawn_used += len(taken)
            token_ids += taken
        self._tokens.extend(token_ids)
        return token_ids

    def _draw(self) -> None:
        eos_from = self._eos_from
        self._drawn, self._chain = self._model.draw(
            self._chain, min(self._block_size, self._left), eos_from=eos_from
        )
        self._drawn_used = 0
        self._left -= len(self._drawn)
        if eos_from is not None:
            self._eos_from = max(0, eos_from - len(self._drawn))


class EngineSequence:
    """``computed_tokens`` of ``n_tokens`` have KV in ``table``, which has room for ``room_tokens``;
    ``credit_tokens`` may still be generated. Of steps that are planned and have not ended, it computes
    ``planned_tokens`` and generates ``planned_outputs``.
    """

    __slots__ = (
        "cached_tokens",
        "came_s",
        "computed_tokens",
        "content",
        "credit_tokens",
        "error",
        "finish",
        "first_s",
        "is_dirty",
        "key",
        "kv_lost",
        "kv_transfer_params",
        "max_tokens",
        "n_tokens",
        "output_tokens",
        "pending",
        "planned_outputs",
        "planned_tokens",
        "prefilling",
        "request",
        "room_tokens",
        "sent_cached",
        "state",
        "table",
        "wants_remote_kv",
    )

    def __init__(
        self, request: EngineRequest, content: Content, *, credit_tokens: int, came_s: float
    ) -> None:
        self.key = sequence_key(request)
        self.request = request
        self.content = content
        self.n_tokens = content.prompt_tokens
        self.credit_tokens = credit_tokens
        self.came_s = came_s
        self.first_s: float | None = None
        self.max_tokens = request.sampling.max_tokens
        self.state = SequenceState.WAITING
        self.wants_remote_kv = request.leg is Leg.DECODE
        self.prefilling = True
        self.table: TableId | None = None
        self.room_tokens = 0
        self.computed_tokens = 0
        self.planned_tokens = 0
        self.planned_outputs = 0
        self.output_tokens = 0
        self.cached_tokens: int | None = None
        self.sent_cached = False
        self.pending: list[int] = []
        self.is_dirty = False
        self.finish: FinishReason | None = None
        self.error: str | None = None
        self.kv_lost: KvLoss | None = None
        self.kv_transfer_params: KvTransferParams | None = None

    @property
    def remaining_tokens(self) -> int:
        """Tokens whose KV is still to be computed."""
        return self.n_tokens - self.computed_tokens

    def take_chunk(self) -> EngineChunk:
        """Return what the reader has not been given yet, as one chunk."""
        cached_tokens = None if self.sent_cached else self.cached_tokens
        self.sent_cached = self.sent_cached or cached_tokens is not None
        chunk = EngineChunk(
            token_ids=tuple(self.pending),
            finish=self.finish,
            cached_tokens=cached_tokens,
            kv_transfer_params=self.kv_transfer_params,
            error=self.error,
            kv_lost=self.kv_lost,
        )
        self.pending.clear()
        self.is_dirty = False
        return chunk

"""One leg inside an engine: its tokens, the KV it holds, and its output that was not read yet."""

from array import array
from enum import Enum, auto
from typing import NewType

from kvrouter.core.events import unpack_hashes
from kvrouter.core.hashing import block_hashes, hash_seed
from kvrouter.core.requests import EngineChunk, EngineRequest, FinishReason, KvLoss, KvTransferParams, Leg
from kvrouter.mock.paged_kv import BlockTable

SequenceKey = NewType("SequenceKey", str)
"""What an engine calls one leg of one attempt."""

UNLIMITED_CREDIT = 1 << 62


def sequence_key(request: EngineRequest) -> SequenceKey:
    """Return the key of ``request``: both legs of one attempt may be at one engine."""
    return SequenceKey(f"{request.engine_key}/{request.leg}")


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


class EngineSequence:
    """``computed_tokens`` of ``tokens`` have KV in ``table``, which has room for ``room_tokens``;
    ``credit_tokens`` may still be generated. ``eos_token_id`` is None when the model never draws it.
    """

    __slots__ = (
        "block_hashes",
        "cached_tokens",
        "chain",
        "computed_tokens",
        "credit_tokens",
        "drawn",
        "drawn_used",
        "error",
        "finish",
        "hash_seed",
        "key",
        "kv_lost",
        "kv_transfer_params",
        "max_tokens",
        "may_draw_eos",
        "output_tokens",
        "pending",
        "prefilling",
        "request",
        "room_tokens",
        "sent_cached",
        "state",
        "stop_token_ids",
        "table",
        "tokens",
        "wants_remote_kv",
    )

    def __init__(
        self,
        request: EngineRequest,
        *,
        block_size: int,
        chain: int,
        credit_tokens: int,
        eos_token_id: int | None,
    ) -> None:
        self.key = sequence_key(request)
        self.request = request
        self.tokens = array("I", request.token_ids)
        self.hash_seed = hash_seed(lora_name=request.lora_name, cache_namespace=request.cache_namespace)
        self.block_hashes = list(
            unpack_hashes(block_hashes(self.tokens, block_size=block_size, seed=self.hash_seed))
        )
        self.chain = chain
        self.credit_tokens = credit_tokens
        self.max_tokens = request.sampling.max_tokens
        self.may_draw_eos = eos_token_id is not None and not request.sampling.ignore_eos
        self.stop_token_ids = frozenset(request.sampling.stop_token_ids)
        if self.may_draw_eos and eos_token_id is not None:
            self.stop_token_ids |= {eos_token_id}
        self.state = SequenceState.WAITING
        self.wants_remote_kv = request.leg is Leg.DECODE
        self.prefilling = True
        self.table: BlockTable | None = None
        self.room_tokens = 0
        self.computed_tokens = 0
        self.output_tokens = 0
        self.drawn: list[int] = []
        self.drawn_used = 0
        self.cached_tokens: int | None = None
        self.sent_cached = False
        self.pending: list[int] = []
        self.finish: FinishReason | None = None
        self.error: str | None = None
        self.kv_lost: KvLoss | None = None
        self.kv_transfer_params: KvTransferParams | None = None

    @property
    def remaining_tokens(self) -> int:
        """Tokens whose KV is still to be computed."""
        return len(self.tokens) - self.computed_tokens

    def hash_blocks(self, n_blocks: int, block_size: int) -> None:
        """Make sure that the first ``n_blocks`` blocks, which are full, have their hashes."""
        known = len(self.block_hashes)
        if n_blocks > known:
            tokens = self.tokens[known * block_size : n_blocks * block_size]
            column = block_hashes(tokens, block_size=block_size, seed=self.hash_seed)
            self.block_hashes.extend(unpack_hashes(column))

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
        return chunk

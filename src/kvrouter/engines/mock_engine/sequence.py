"""One leg inside an engine: its prompt, its output, and its end."""

from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple, NewType

from kvrouter.core.events import HashColumn
from kvrouter.core.hashing import block_hashes, hash_seed
from kvrouter.core.ids import RequestId, WorkerId
from kvrouter.core.requests import EngineChunk, EngineRequest, FinishReason, KvLoss, KvTransferParams, Leg
from kvrouter.engines.mock_engine.config import MockConfig
from kvrouter.engines.mock_engine.tokens import TokenModel

SequenceKey = NewType("SequenceKey", str)
"""An engine's name for one leg of one attempt."""

SequenceHandle = NewType("SequenceHandle", int)
"""The number of a sequence in :class:`kvrouter._native.EngineRanks`."""

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


class NamedContent:
    """A leg given by its length and the hashes of its prompt's blocks. Its output is unique: the blocks that
    it fills get their own names, drawn from ``salt``.
    """

    __slots__ = ("block_hashes", "prompt_tokens", "salt")

    may_stop = False

    def __init__(self, block_hashes: HashColumn, *, prompt_tokens: int, salt: int) -> None:
        self.block_hashes = block_hashes
        self.prompt_tokens = prompt_tokens
        self.salt = salt

    def next_tokens(self, n_tokens: int) -> Sequence[int]:
        """Return this many tokens; their values are not used."""
        return _ZERO_TOKENS[:n_tokens] if n_tokens <= len(_ZERO_TOKENS) else (0,) * n_tokens


_ZERO_TOKENS = (0,) * 1024


class TokenContent:
    """A leg with tokens, which the mock model continues. It draws about a block ahead: tokens depend only on
    those before them.
    """

    __slots__ = (
        "_block_size",
        "_chain",
        "_eos_from",
        "_left",
        "_min_tokens",
        "_model",
        "_n_read",
        "_seed",
        "_stop_token_ids",
        "_tokens",
        "block_hashes",
        "may_stop",
        "prompt_tokens",
    )

    def __init__(self, request: EngineRequest, config: MockConfig, model: TokenModel) -> None:
        sampling = request.sampling
        self.prompt_tokens = len(request.token_ids)
        self._tokens = array("I", request.token_ids)
        self._seed = hash_seed(lora_name=request.lora_name, cache_namespace=request.cache_namespace)
        self._block_size = config.block_size
        self.block_hashes = block_hashes(self._tokens, block_size=config.block_size, seed=self._seed)
        self._min_tokens = sampling.min_tokens
        self._stop_token_ids = frozenset(sampling.stop_token_ids)
        self._eos_from: int | None = None
        if config.eos_every is not None and not sampling.ignore_eos:
            self._stop_token_ids |= {config.eos_token_id}
            self._eos_from = sampling.min_tokens
        self.may_stop = bool(self._stop_token_ids)
        self._left = sampling.max_tokens
        self._model = model
        self._chain = model.state(request.token_ids, sampling)
        self._n_read = self.prompt_tokens

    def hash_blocks(self, known: int, n_blocks: int) -> HashColumn:
        """Return the hashes of its full blocks from ``known`` to ``n_blocks``."""
        begin, end = known * self._block_size, n_blocks * self._block_size
        self._draw_to(end)
        return block_hashes(self._tokens[begin:end], block_size=self._block_size, seed=self._seed)

    def stops(self, n_output: int) -> bool:
        """Whether the output ends with its token number ``n_output``, counted from 1."""
        if n_output <= self._min_tokens:
            return False
        n_tokens = self.prompt_tokens + n_output
        self._draw_to(n_tokens)
        return self._tokens[n_tokens - 1] in self._stop_token_ids

    def next_tokens(self, n_tokens: int) -> Sequence[int]:
        """Return the next ``n_tokens`` tokens of the output."""
        begin, self._n_read = self._n_read, self._n_read + n_tokens
        self._draw_to(self._n_read)
        return self._tokens[begin : self._n_read]

    def _draw_to(self, n_tokens: int) -> None:
        """Draw tokens up to a total of ``n_tokens``, the prompt's included."""
        while len(self._tokens) < n_tokens:
            eos_from = self._eos_from
            drawn, self._chain = self._model.draw(
                self._chain, min(self._block_size, self._left), eos_from=eos_from
            )
            self._tokens.extend(drawn)
            self._left -= len(drawn)
            if eos_from is not None:
                self._eos_from = max(0, eos_from - len(drawn))


Content = TokenContent | NamedContent
"""The content of a leg: its prompt, and then its output."""


class EngineSequence:
    """One leg at an engine, which it came to at ``came_s``. ``finish`` is None but for a leg that is ended
    early: that it ended by its length or a stop token is known to the scheduler.
    """

    __slots__ = (
        "came_s",
        "content",
        "error",
        "fetched_tokens",
        "finish",
        "handle",
        "key",
        "kv_bytes",
        "kv_lost",
        "kv_transfer_params",
        "request",
        "wants_remote_kv",
    )

    def __init__(
        self,
        key: SequenceKey,
        handle: SequenceHandle,
        request: EngineRequest,
        content: Content,
        came_s: float,
    ) -> None:
        self.key = key
        self.handle = handle
        self.request = request
        self.content = content
        self.came_s = came_s
        self.wants_remote_kv = request.leg is Leg.DECODE or bool(request.kv_transfer_params)
        self.fetched_tokens = 0
        """The first tokens of a prefill leg's prompt whose KV it fetched; they count as cached."""
        self.kv_bytes: int | None = None
        """The bytes fetched for it, until a chunk reports them."""
        self.finish: FinishReason | None = None
        self.error: str | None = None
        self.kv_lost: KvLoss | None = None
        self.kv_transfer_params: KvTransferParams | None = None

    def chunk(self, n_tokens: int, cached_tokens: int | None, finish: FinishReason | None) -> EngineChunk:
        """Return the next ``n_tokens`` tokens, which the reader does not have yet, and the ending."""
        chunk = EngineChunk(
            token_ids=tuple(self.content.next_tokens(n_tokens)) if n_tokens else (),
            finish=self.finish or finish,
            cached_tokens=None if cached_tokens is None else max(cached_tokens, self.fetched_tokens),
            kv_transfer_params=self.kv_transfer_params,
            error=self.error,
            kv_lost=self.kv_lost,
            kv_bytes=self.kv_bytes,
        )
        self.kv_bytes = None
        return chunk

"""The configuration of a mock engine: its sizes, its timing, and how it fails."""

from collections.abc import Sequence
from enum import StrEnum
from math import isfinite

import msgspec

from kvrouter.core.errors import ConfigError
from kvrouter.core.timing import Timing
from kvrouter.core.workers import Role


class EngineHashing(StrEnum):
    """How an engine names its blocks: alike on every engine, or in a way that only this engine knows."""

    DETERMINISTIC = "deterministic"
    OPAQUE = "opaque"


class KvLoadFailurePolicy(StrEnum):
    """The policy for a decode leg whose KV never comes."""

    FAIL = "fail"
    RECOMPUTE = "recompute"


class MockConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One mock engine. Sizes are those of one data-parallel rank.

    ``seed`` distinguishes engines. Engines with the same ``model_seed`` and ``allowed_token_ids`` generate
    the same tokens. About one token in ``eos_every`` ends the sequence; with None a sequence ends by its
    length alone. With ``async_scheduling`` a step is planned when the one before it begins, as vLLM does.
    ``bootstrap_host`` and ``bootstrap_port`` let it take bootstrap handoffs. Engines whose ``handshake``
    differs refuse each other's KV.
    """

    role: Role = Role.BOTH
    block_size: int = 64
    total_kv_blocks: int = 16_384
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8_192
    max_waiting_seqs: int = 4_096
    prefix_caching: bool = True
    chunked_prefill: bool = True
    async_scheduling: bool = False
    dp_size: int = 1
    dp_start: int = 0
    kv_bytes_per_token: int = 131_072
    timing: Timing = Timing()
    engine_hashing: EngineHashing = EngineHashing.DETERMINISTIC
    kv_load_failure_policy: KvLoadFailurePolicy = KvLoadFailurePolicy.FAIL
    kv_wait_expiry_s: float = 60.0
    handshake: str = ""
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None
    vocab_size: int = 32_000
    allowed_token_ids: Sequence[int] | None = None
    eos_token_id: int = 2
    eos_every: int | None = None
    model_seed: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in (
            "block_size",
            "total_kv_blocks",
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_waiting_seqs",
            "dp_size",
            "kv_bytes_per_token",
            "vocab_size",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: must be at least 1, not {getattr(self, name)}", param=name)
        if self.dp_start < 0:
            raise ConfigError(f"dp_start: must be at least 0, not {self.dp_start}", param="dp_start")
        if not (isfinite(self.kv_wait_expiry_s) and self.kv_wait_expiry_s > 0.0):
            raise ConfigError("kv_wait_expiry_s: must be finite and above 0", param="kv_wait_expiry_s")
        if self.eos_every is not None and self.eos_every < 1:
            raise ConfigError("eos_every: must be at least 1", param="eos_every")
        if (self.bootstrap_host is None) != (self.bootstrap_port is None):
            raise ConfigError("bootstrap_host: set it together with bootstrap_port", param="bootstrap_host")
        ids = self.token_ids
        if not ids or min(ids) < 0 or max(ids) >= self.vocab_size:
            raise ConfigError(
                f"allowed_token_ids: one or more ids below vocab_size={self.vocab_size}",
                param="allowed_token_ids",
            )

    def refusal_of(self, handshake: str) -> str:
        """Return why the engine refuses another's handshake; empty if it does not."""
        if handshake == self.handshake:
            return ""
        return f"handshake refused: {self.handshake or 'none'} here, {handshake or 'none'} there"

    @property
    def token_ids(self) -> Sequence[int]:
        """The ids that the engine may emit, apart from the end of sequence."""
        return range(self.vocab_size) if self.allowed_token_ids is None else self.allowed_token_ids

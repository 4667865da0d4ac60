"""What a mock engine is: its sizes, its timing, and how it fails."""

from collections.abc import Sequence
from enum import StrEnum
from math import isfinite

import msgspec

from kvrouter.core.errors import ConfigError
from kvrouter.core.workers import Role


class EngineHashing(StrEnum):
    """How an engine names its blocks: alike on every engine, or in a way that only this engine knows."""

    DETERMINISTIC = "deterministic"
    OPAQUE = "opaque"


class KvLoadFailurePolicy(StrEnum):
    """What a decode leg does when the KV that it waits for will never come."""

    FAIL = "fail"
    RECOMPUTE = "recompute"


NOT_NEGATIVE = (
    "prefill_quadratic",
    "prefill_linear",
    "prefill_base",
    "prefill_attention",
    "decode_sequence",
    "decode_kv_token",
    "mixed_kv_token",
)
"""Figures of a timing that would make a step end before it begins, were they below 0."""


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """How long one engine step takes, in milliseconds.

    With ``t`` prompt tokens computed in the step, ``a`` pairs of such a token and one that it attends to,
    ``n`` sequences that decode, ``k`` tokens of KV that these read, and ``u`` the share of KV blocks in use
    (0..1)::

        prefill_ms = prefill_quadratic · t² + prefill_linear · t + prefill_base + prefill_attention · a
                                                                                      0 when t = 0
        decode_ms  = max(decode_min, decode_quadratic · u² + decode_linear · u + decode_base)
                     + decode_sequence · n + decode_kv_token · k                      0 when n = 0
        mixed_ms   = mixed_kv_token · k                                     0 when t = 0 or n = 0
        step_ms    = prefill_ms + decode_ms + mixed_ms

    The default figures are those of Dynamo's mocker (vLLM backend), as observed in ai-dynamo-runtime 1.6.1.
    """

    prefill_quadratic: float = 4.209989e-7
    prefill_linear: float = 1.518344e-2
    prefill_base: float = 16.50142
    prefill_attention: float = 0.0
    decode_quadratic: float = -25.74
    decode_linear: float = 54.01
    decode_base: float = 5.74
    decode_min: float = 1.0
    decode_sequence: float = 0.0
    decode_kv_token: float = 0.0
    mixed_kv_token: float = 0.0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if not isfinite(getattr(self, name)):
                raise ConfigError(f"timing.{name}: must be finite", param=f"timing.{name}")
        for name in NOT_NEGATIVE:
            if getattr(self, name) < 0.0:
                raise ConfigError(f"timing.{name}: must be 0 or more", param=f"timing.{name}")
        if self.decode_min <= 0.0:
            raise ConfigError("timing.decode_min: must be above 0", param="timing.decode_min")

    def prefill_ms(self, new_tokens: int, attended: float = 0.0) -> float:
        """Return the prefill part of a step that computes ``new_tokens`` prompt tokens, which attend to
        ``attended`` tokens in all.
        """
        if not new_tokens:
            return 0.0
        curve = (self.prefill_quadratic * new_tokens + self.prefill_linear) * new_tokens + self.prefill_base
        return curve + self.prefill_attention * attended

    def decode_ms(self, utilisation: float, n_sequences: int = 0, kv_tokens: int = 0) -> float:
        """Return the decode part of a step, at this share of KV blocks in use, in which ``n_sequences`` read
        ``kv_tokens`` of KV.
        """
        curve = (self.decode_quadratic * utilisation + self.decode_linear) * utilisation + self.decode_base
        lasts = max(self.decode_min, curve)
        return lasts + self.decode_sequence * n_sequences + self.decode_kv_token * kv_tokens

    def mixed_ms(self, kv_tokens: int) -> float:
        """Return what a step takes longer as some sequences prefill while others read ``kv_tokens``."""
        return self.mixed_kv_token * kv_tokens


class MockConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One mock engine. Sizes are those of one data-parallel rank.

    ``seed`` distinguishes engines. Engines with the same ``model_seed`` and ``allowed_token_ids`` generate
    the same tokens. ``eos_every`` makes about one token in so many the end of the sequence; without it a
    sequence ends by its length alone. With ``async_scheduling`` a step is planned when the one before it
    begins, as vLLM does. ``bootstrap_host`` and ``bootstrap_port`` let it take bootstrap handoffs.
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

    @property
    def token_ids(self) -> Sequence[int]:
        """The ids that the engine may emit, apart from the end of sequence."""
        return range(self.vocab_size) if self.allowed_token_ids is None else self.allowed_token_ids

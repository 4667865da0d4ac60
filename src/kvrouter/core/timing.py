"""The duration of one engine step: a formula with coefficients for a kind of engine."""

from math import isfinite

import msgspec

from kvrouter.core.errors import ConfigError

NOT_NEGATIVE = (
    "prefill_quadratic",
    "prefill_linear",
    "prefill_base",
    "prefill_attention",
    "decode_sequence",
    "decode_kv_token",
    "mixed_kv_token",
)
"""Coefficients that must not be negative, so that every step has a positive duration."""


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """The duration of one engine step, in milliseconds.

    With ``t`` prompt tokens computed in the step, ``a`` pairs of such a token and one that it attends to,
    ``n`` sequences that decode, ``k`` tokens of KV that these read, and ``u`` the share of KV blocks in use
    (0..1)::

        prefill_ms = prefill_quadratic · t² + prefill_linear · t + prefill_base + prefill_attention · a
                                                                                      0 when t = 0
        decode_ms  = max(decode_min, decode_quadratic · u² + decode_linear · u + decode_base)
                     + decode_sequence · n + decode_kv_token · k                      0 when n = 0
        mixed_ms   = mixed_kv_token · k                                     0 when t = 0 or n = 0
        step_ms    = prefill_ms + decode_ms + mixed_ms

    The defaults are those of Dynamo's mocker (vLLM backend), as observed in ai-dynamo-runtime 1.6.1.
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
        """Return the decode part of a step in which ``n_sequences`` read ``kv_tokens`` of KV, with the share
        ``utilisation`` of KV blocks in use.
        """
        curve = (self.decode_quadratic * utilisation + self.decode_linear) * utilisation + self.decode_base
        lasts = max(self.decode_min, curve)
        return lasts + self.decode_sequence * n_sequences + self.decode_kv_token * kv_tokens

    def mixed_ms(self, kv_tokens: int) -> float:
        """Return the extra time of a step in which some sequences prefill while others read ``kv_tokens``."""
        return self.mixed_kv_token * kv_tokens

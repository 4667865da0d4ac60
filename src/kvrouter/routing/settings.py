"""What the operator sets about the decision."""

from math import isfinite
from typing import NamedTuple

import msgspec

from kvrouter.core.constraints import RouterConfigOverride, RouterMode
from kvrouter.core.errors import ConfigError
from kvrouter.topology import LinkTable, RouterTopologyDefault


class RoutingSettings(msgspec.Struct, frozen=True):
    """The decision's settings for one model; a request may override three of them.

    ``active_decode_blocks_threshold`` is a fraction of a worker's blocks, ``active_prefill_tokens_threshold``
    a number of tokens; above either one a worker is busy. ``kv_transfer_weight`` is in blocks a second of
    transfer, and counts only where ``links`` is given. With ``prefill_alone`` the prefill leg is all that is
    decided: somebody else picks decode. Raises ConfigError naming the setting.
    """

    mode: RouterMode = RouterMode.KV
    overlap_score_weight: float = 1.0
    temperature: float = 0.0
    track_active_blocks: bool = True
    track_prefill_tokens: bool = True
    active_decode_blocks_threshold: float | None = None
    active_prefill_tokens_threshold: int | None = None
    kv_transfer_weight: float = 0.0
    links: LinkTable | None = None
    topology_default: RouterTopologyDefault | None = None
    prefill_alone: bool = False

    def __post_init__(self) -> None:
        _check_at_least_0("overlap_score_weight", self.overlap_score_weight)
        _check_at_least_0("temperature", self.temperature)
        _check_at_least_0("kv_transfer_weight", self.kv_transfer_weight)
        fraction = self.active_decode_blocks_threshold
        if fraction is not None and not 0.0 <= fraction <= 1.0:
            raise ConfigError(
                f"active_decode_blocks_threshold: {fraction} is not between 0 and 1",
                param="active_decode_blocks_threshold",
            )
        tokens = self.active_prefill_tokens_threshold
        if tokens is not None:
            _check_at_least_0("active_prefill_tokens_threshold", tokens)


class Rules(NamedTuple):
    """How this one request is picked for: the settings with its override."""

    mode: RouterMode
    overlap_score_weight: float
    temperature: float


def rules_of(settings: RoutingSettings, override: RouterConfigOverride) -> Rules:
    """Return the rules for a request; what its override leaves None is the router's."""
    mode, weight, temperature = (
        override.router_mode,
        override.overlap_score_weight,
        override.router_temperature,
    )
    return Rules(
        settings.mode if mode is None else mode,
        settings.overlap_score_weight if weight is None else weight,
        settings.temperature if temperature is None else temperature,
    )


def _check_at_least_0(name: str, number: float) -> None:
    if not (isfinite(number) and number >= 0):
        raise ConfigError(f"{name}: {number} is not 0 or more", param=name)

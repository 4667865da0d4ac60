"""The published rules by name, with their parameters and the values that are tried when they are tuned."""

from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from types import MappingProxyType
from typing import Any, NamedTuple

from kvrouter.core.errors import ConfigError
from kvrouter.settings.problems import did_you_mean
from kvrouter.sim.rules.affinity import AibrixPrefix, LlmdScorers, SglangCacheAware, StickySessions
from kvrouter.sim.rules.balancers import LeastLoaded, PowerOfTwo, Random, RoundRobin
from kvrouter.sim.rules.costs import DynamoCost, LMetric, PredictedTtft
from kvrouter.sim.rules.rule import PublishedRule

GRID_MAX = 12
"""How many points a rule is tuned over, its published values included."""


class KnownRule(NamedTuple):
    """A rule that can be named. ``grid`` has at most :data:`GRID_MAX` points."""

    make: Callable[..., PublishedRule]
    parameters: Mapping[str, float]
    """Its parameters with their published values."""
    grid: Sequence[Mapping[str, float]] = ()


RULES: Mapping[str, KnownRule] = MappingProxyType(
    {
        "round-robin": KnownRule(RoundRobin, {}),
        "random": KnownRule(Random, {}),
        "least-loaded": KnownRule(LeastLoaded, {}),
        "power-of-two": KnownRule(PowerOfTwo, {}),
        "dynamo": KnownRule(
            DynamoCost,
            {"overlap_weight": 1.0, "temperature": 0.0},
            [
                {"overlap_weight": weight, "temperature": temperature}
                for weight in (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
                for temperature in (0.0, 0.2)
            ],
        ),
        "lmetric": KnownRule(LMetric, {}),
        "predicted-ttft": KnownRule(
            PredictedTtft,
            {"queue_ms_per_token": 0.017},
            [{"queue_ms_per_token": value} for value in (0.004, 0.008, 0.012, 0.017, 0.024, 0.034, 0.07)],
        ),
        "llm-d": KnownRule(
            LlmdScorers,
            {"queue": 2.0, "kv": 2.0, "prefix": 3.0},
            [
                {"queue": queue, "kv": kv, "prefix": 3.0}
                for queue in (0.5, 1.0, 2.0, 4.0)
                for kv in (0.5, 2.0, 4.0)
            ],
        ),
        "aibrix": KnownRule(
            AibrixPrefix,
            {"imbalance": 8.0, "factor": 2.0, "deviations": 1.0},
            [
                {"imbalance": imbalance, "factor": 2.0, "deviations": deviations}
                for imbalance in (4.0, 8.0, 16.0, 32.0)
                for deviations in (0.5, 1.0, 2.0)
            ],
        ),
        "sglang": KnownRule(
            SglangCacheAware,
            {"cache": 0.3, "balance_abs": 64.0, "balance_rel": 1.5},
            [
                {"cache": cache, "balance_abs": balance, "balance_rel": 1.5}
                for cache in (0.1, 0.3, 0.5)
                for balance in (4.0, 16.0, 32.0, 64.0)
            ],
        ),
        "sticky": KnownRule(
            StickySessions,
            {"escape": 2.0, "floor": 0.0},
            [
                {"escape": escape, "floor": floor}
                for escape in (1.25, 1.5, 2.0, 3.0, 4.0)
                for floor in (0.0, 1.0)
            ],
        ),
    }
)
"""Every rule that a replay can be given instead of the router's own."""


def parse_rule(text: str) -> PublishedRule:
    """Return the rule of ``name`` or ``name:parameter=value,parameter=value``. Raises ConfigError."""
    name, colon, leg_input = text.partition(":")
    known = RULES.get(name)
    if known is None:
        hint = did_you_mean(name, [*RULES, "kvrouter"])
        raise ConfigError(f"policy: {name!r} is none of kvrouter, {', '.join(RULES)}{hint}", param="policy")
    parameters: dict[str, Any] = {}
    for pair in leg_input.split(",") if colon else ():
        key, _, value = (part.strip() for part in pair.partition("="))
        if key not in known.parameters:
            names = ", ".join(known.parameters) or "none"
            raise ConfigError(f"policy: {name} has no parameter {key!r}; it has {names}", param="policy")
        if key in parameters:
            raise ConfigError(f"policy: {name}: {key} is given twice", param="policy")
        parameters[key] = _number(f"{name}:{key}", value)
    return known.make(**parameters)


def _number(field: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not isfinite(value) or value < 0.0:
        raise ConfigError(f"policy: {field}: {text!r} is not a number of 0 or more", param="policy")
    return value

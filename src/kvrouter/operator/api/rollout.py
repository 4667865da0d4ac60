"""How a component's Deployment replaces its pods, in Kubernetes' own words."""

from enum import StrEnum

from pydantic import ConfigDict

from kvrouter.operator.api.names import DomainName, ObjectPart, PodsOrShare, Rule, rules

PROGRESS_DEADLINE_S = 600
"""Kubernetes' own, where a component states none."""

WARM_UP_S = 60
"""``minReadySeconds`` of workers under ``spec.upgrade``, where a component states none."""

ONLY_ROLLING = "is only for type: RollingUpdate"


class StrategyType(StrEnum):
    """How old pods give way to new ones."""

    ROLLING_UPDATE = "RollingUpdate"
    RECREATE = "Recreate"


class RollingUpdate(ObjectPart):
    """How many pods are replaced at a time."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            Rule(
                "!has(self.maxSurge) || !has(self.maxUnavailable) || "
                "!(string(self.maxSurge) in ['0', '0%'] && string(self.maxUnavailable) in ['0', '0%'])",
                "maxSurge and maxUnavailable cannot both be 0: no pod could be replaced",
            )
        )
    )

    max_surge: PodsOrShare | None = None
    """How many pods more than ``replicas`` there may be. Left out: 1 on frontends; 0 on workers, whose new
    pods need the accelerators of the old ones."""
    max_unavailable: PodsOrShare | None = None
    """How many pods of ``replicas`` may be missing. Left out: 0 on frontends, 25% on workers."""


class Strategy(ObjectPart):
    """How old pods give way to new ones."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            Rule(
                "!has(self.rollingUpdate) || !has(self.type) || self.type == 'RollingUpdate'",
                f"rollingUpdate {ONLY_ROLLING}",
            )
        )
    )

    type: StrategyType = StrategyType.ROLLING_UPDATE
    """``RollingUpdate``: a few at a time. ``Recreate``: all old pods end before the first new one starts."""
    rolling_update: RollingUpdate | None = None
    """How many at a time."""


class Upgrade(ObjectPart):
    """How a change of workers' templates passes through the fleet."""

    by: DomainName
    """Level of the policy of KV transfers, such as zone: the workers of one zone are replaced after those of
    another, prefill and decode workers together. The next ones wait until all new ones were Ready for their
    minReadySeconds, and requests are served."""

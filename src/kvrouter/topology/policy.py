"""How strictly the KV of a prefill worker keeps to its domain, and what that asks of the decode worker."""

from enum import StrEnum

import msgspec

from kvrouter.core.errors import ConfigError
from kvrouter.core.ids import Taint
from kvrouter.core.workers import Enforcement, ModelRuntimeConfig
from kvrouter.topology.taints import topology_domains, topology_taint


class Required(msgspec.Struct, frozen=True, tag="required"):
    """KV never leaves the domain; a request that cannot keep to it is refused before prefill."""

    domain: str


class Fallback(msgspec.Struct, frozen=True, tag="fallback"):
    """KV stays in the domain while a decode worker there may take it; otherwise any decode worker may."""

    domain: str


class Preferred(msgspec.Struct, frozen=True, tag="preferred"):
    """Cost decides; the domain's own decode workers cost less. 0 ≤ weight ≤ 1."""

    domain: str
    weight: float


TransferPolicy = Required | Fallback | Preferred


class MismatchPolicy(StrEnum):
    """What the router's own default does when no decode worker is in the prefill worker's domain."""

    FAIL = "fail"
    FALLBACK = "fallback"


class RouterTopologyDefault(msgspec.Struct, frozen=True):
    """The router's policy for prefill workers that publish none."""

    kv_transfer_topology_level: str
    kv_transfer_mismatch_policy: MismatchPolicy = MismatchPolicy.FAIL

    @property
    def policy(self) -> TransferPolicy:
        """``fail`` is required, ``fallback`` is fallback."""
        domain = self.kv_transfer_topology_level.strip()
        if self.kv_transfer_mismatch_policy is MismatchPolicy.FALLBACK:
            return Fallback(domain)
        return Required(domain)


class TransferConstraint(msgspec.Struct, frozen=True):
    """What one prefill worker asks of the decode worker; frozen, and travels with the request.

    ``value`` is the prefill worker's own value of the policy's domain. It is None when that is not known:
    then no decode worker satisfies ``Required``, and ``Fallback`` and ``Preferred`` have nothing to hold to.
    """

    policy: TransferPolicy
    value: str | None

    @property
    def domain(self) -> str:
        """The domain of the policy."""
        return self.policy.domain

    @property
    def taint(self) -> Taint | None:
        """The taint that a decode worker of the same domain carries."""
        return None if self.value is None else topology_taint(self.policy.domain, self.value)


def policy_of(
    config: ModelRuntimeConfig | None, router_default: RouterTopologyDefault | None
) -> TransferPolicy | None:
    """Return the policy of a prefill worker: its own, else the router's, else None.

    A domain without an enforcement is required. Raises ConfigError for ``preferred`` without a weight.
    """
    domain = (config.kv_transfer_domain or "").strip() if config is not None else ""
    if config is None or not domain:
        return None if router_default is None else router_default.policy
    match config.kv_transfer_enforcement:
        case Enforcement.FALLBACK:
            return Fallback(domain)
        case Enforcement.PREFERRED:
            if config.kv_transfer_preferred_weight is None:
                raise ConfigError(
                    "kv_transfer_preferred_weight: enforcement 'preferred' needs a weight between 0 and 1",
                    param="kv_transfer_preferred_weight",
                )
            return Preferred(domain, config.kv_transfer_preferred_weight)
        case Enforcement.REQUIRED | None:
            return Required(domain)


def derive(
    config: ModelRuntimeConfig | None,
    *,
    router_default: RouterTopologyDefault | None = None,
    required_elsewhere: str | None = None,
) -> TransferConstraint | None:
    """Return what the selected prefill worker asks of the decode worker; None when it asks nothing.

    ``config`` is None for a worker that the fleet does not know. Such a worker may be one of those that
    require ``required_elsewhere`` (a domain that some known worker requires), so it is held to that domain
    without a known value, which no decode worker satisfies: the request fails closed.
    """
    if config is None:
        policy = (
            policy_of(None, router_default) if required_elsewhere is None else Required(required_elsewhere)
        )
        return None if policy is None else TransferConstraint(policy, None)
    policy = policy_of(config, router_default)
    if policy is None:
        return None
    return TransferConstraint(policy, topology_domains(config).get(policy.domain))

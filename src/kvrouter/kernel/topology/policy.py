"""Transfer policies, and the checks of a worker's topology."""

from collections import Counter
from enum import StrEnum

import msgspec

from kvrouter.core.errors import ConfigError
from kvrouter.core.ids import Taint
from kvrouter.core.taints import TOPOLOGY, topology_taint
from kvrouter.core.workers import Enforcement, ModelRuntimeConfig


class Required(msgspec.Struct, frozen=True, tag="required"):
    """KV never leaves the domain; a request without a decode worker there is refused before prefill."""

    domain: str


class Fallback(msgspec.Struct, frozen=True, tag="fallback"):
    """KV stays in the domain while a decode worker there may take it; otherwise any decode worker may."""

    domain: str


class Preferred(msgspec.Struct, frozen=True, tag="preferred"):
    """Cost decides; decode workers in the domain cost less. 0 ≤ weight ≤ 1."""

    domain: str
    weight: float


TransferPolicy = Required | Fallback | Preferred


class MismatchPolicy(StrEnum):
    """The effect of the router's default policy when no decode worker is in the prefill worker's domain."""

    FAIL = "fail"
    FALLBACK = "fallback"


class RouterTopologyDefault(msgspec.Struct, frozen=True):
    """The router's policy for prefill workers that publish none."""

    kv_transfer_topology_level: str
    kv_transfer_mismatch_policy: MismatchPolicy = MismatchPolicy.FAIL

    @property
    def policy(self) -> TransferPolicy:
        """The equivalent transfer policy: ``fail`` is required, ``fallback`` is fallback."""
        domain = self.kv_transfer_topology_level.strip()
        if self.kv_transfer_mismatch_policy is MismatchPolicy.FALLBACK:
            return Fallback(domain)
        return Required(domain)


class NearFrontend(msgspec.Struct, frozen=True):
    """The rule that prefill stays near the frontend: workers with the frontend's ``value`` of ``domain`` are
    required, or cheaper by ``weight``, from 0 to 1. ``value`` is None while the frontend does not know its
    own value: then no worker is near.
    """

    domain: str
    value: str | None
    is_required: bool
    weight: float

    @property
    def taint(self) -> Taint | None:
        """The taint that workers near the frontend carry."""
        return None if self.value is None else topology_taint(self.domain, self.value)


class TransferConstraint(msgspec.Struct, frozen=True):
    """A prefill worker's transfer policy as a constraint on the decode worker, kept with the request.

    ``value`` is the prefill worker's value of the policy's domain. When it is None, which means unknown, no
    decode worker satisfies ``Required``, and ``Fallback`` and ``Preferred`` have no effect.
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
    """Return the selected prefill worker's constraint on the decode worker; None when it has no policy.

    ``config`` is None for a worker that the fleet does not know. If some known worker requires the domain
    ``required_elsewhere``, the unknown one may too: the constraint requires that domain with an unknown
    value, which no decode worker satisfies, so the request fails closed.
    """
    if config is None:
        policy = (
            policy_of(None, router_default) if required_elsewhere is None else Required(required_elsewhere)
        )
        return None if policy is None else TransferConstraint(policy, None)
    policy = policy_of(config, router_default)
    if policy is None:
        return None
    return TransferConstraint(policy, config.domains.get(policy.domain))


def validate_runtime_config(config: ModelRuntimeConfig) -> list[str]:
    """Validate a worker's configuration; return warnings, one line each.

    Raises ConfigError with the field as ``param`` for: an own taint under the reserved prefix, domains that
    cannot be distinguished, repeated levels, ``preferred`` without a weight, a weight outside 0..1, a longest
    prompt that is shorter than the shortest.
    """
    _check_taints(config)
    _check_domains(config)
    _check_levels(config)
    _check_weight(config)
    _check_prompts(config)
    return _warnings(config)


def _check_taints(config: ModelRuntimeConfig) -> None:
    for taint in sorted(config.taints):
        if taint.strip().startswith(TOPOLOGY):
            raise ConfigError(
                f"taints: {taint!r} begins with {TOPOLOGY!r}, which is topology_domains' own",
                param="taints",
            )


def _check_domains(config: ModelRuntimeConfig) -> None:
    names = Counter(domain.strip() for domain in config.topology_domains)
    for name, count in names.items():
        if count > 1:
            raise ConfigError(
                f"topology_domains: {name!r} is there {count} times once names are trimmed",
                param="topology_domains",
            )
        if "=" in name:
            raise ConfigError(
                f"topology_domains: {name!r} holds '=', so its taint would be read as another domain's",
                param="topology_domains",
            )


def _check_levels(config: ModelRuntimeConfig) -> None:
    levels = Counter(level.strip() for level in config.topology_levels)
    for level, count in levels.items():
        if not level:
            raise ConfigError("topology_levels: a level without a name", param="topology_levels")
        if count > 1:
            raise ConfigError(f"topology_levels: {level!r} is there {count} times", param="topology_levels")


def _check_weight(config: ModelRuntimeConfig) -> None:
    weight = config.kv_transfer_preferred_weight
    if weight is None:
        if config.kv_transfer_enforcement is Enforcement.PREFERRED:
            raise ConfigError(
                "kv_transfer_preferred_weight: enforcement 'preferred' needs a weight between 0 and 1",
                param="kv_transfer_preferred_weight",
            )
    elif not 0.0 <= weight <= 1.0:  # also true for NaN
        raise ConfigError(
            f"kv_transfer_preferred_weight: {weight} is not between 0 and 1",
            param="kv_transfer_preferred_weight",
        )


def _check_prompts(config: ModelRuntimeConfig) -> None:
    least, most = config.prompt_tokens_min, config.prompt_tokens_max
    if least is not None and most is not None and least > most:
        raise ConfigError(
            f"prompt_tokens_max: {most} is less than prompt_tokens_min, {least}", param="prompt_tokens_max"
        )


def _warnings(config: ModelRuntimeConfig) -> list[str]:
    warnings = []
    enforcement, domain = config.kv_transfer_enforcement, (config.kv_transfer_domain or "").strip()
    if config.kv_transfer_preferred_weight is not None and enforcement is not Enforcement.PREFERRED:
        warnings.append("kv_transfer_preferred_weight is only read when the enforcement is 'preferred'")
    if enforcement is not None and not domain:
        warnings.append(f"kv_transfer_enforcement '{enforcement}' has no effect without kv_transfer_domain")
    if domain and domain not in config.domains:
        warnings.append(
            f"kv_transfer_domain '{domain}' has no value in topology_domains: "
            "its KV transfers cannot be kept inside that domain"
        )
    return warnings

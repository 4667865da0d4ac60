"""What a worker may not publish about where it is."""

from collections import Counter

from kvrouter.core.errors import ConfigError
from kvrouter.core.workers import Enforcement, ModelRuntimeConfig
from kvrouter.topology.taints import RESERVED_TAINT_PREFIX, topology_domains


def validate_runtime_config(config: ModelRuntimeConfig) -> list[str]:
    """Return what is odd in ``config`` but can be run with, one line each.

    Raises ConfigError, whose ``param`` names the field, for what cannot: an own taint under the reserved
    prefix, domains that cannot be told apart, levels that repeat, ``preferred`` without a weight, a weight
    outside 0..1.
    """
    _check_taints(config)
    _check_domains(config)
    _check_levels(config)
    _check_weight(config)
    return _warnings(config)


def _check_taints(config: ModelRuntimeConfig) -> None:
    for taint in sorted(config.taints):
        if taint.strip().startswith(RESERVED_TAINT_PREFIX):
            raise ConfigError(
                f"taints: {taint!r} begins with {RESERVED_TAINT_PREFIX!r}, which is topology_domains' own",
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
    elif not 0.0 <= weight <= 1.0:  # NaN compares false, and is refused here too
        raise ConfigError(
            f"kv_transfer_preferred_weight: {weight} is not between 0 and 1",
            param="kv_transfer_preferred_weight",
        )


def _warnings(config: ModelRuntimeConfig) -> list[str]:
    warnings = []
    enforcement, domain = config.kv_transfer_enforcement, (config.kv_transfer_domain or "").strip()
    if config.kv_transfer_preferred_weight is not None and enforcement is not Enforcement.PREFERRED:
        warnings.append("kv_transfer_preferred_weight is only read when the enforcement is 'preferred'")
    if enforcement is not None and not domain:
        warnings.append(f"kv_transfer_enforcement '{enforcement}' has no effect without kv_transfer_domain")
    if domain and domain not in topology_domains(config):
        warnings.append(
            f"kv_transfer_domain '{domain}' has no value in topology_domains: "
            "its KV transfers cannot be kept inside that domain"
        )
    return warnings

"""Topology environment: the variables of a worker's topology, parsed once and strictly."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvrouter.core.errors import ConfigError
from kvrouter.core.workers import Enforcement
from kvrouter.settings.setting_spec import parse_switch
from kvrouter.settings.variables import text_of

ENABLED = "DYN_TOPOLOGY_ENABLED"
MOUNT_PATH = "DYN_TOPOLOGY_MOUNT_PATH"
LEVELS = "DYN_TOPOLOGY_LEVELS"
POLL_S = "DYN_TOPOLOGY_POLL_S"
TIMEOUT_S = "DYN_TOPOLOGY_TIMEOUT_S"
TRANSFER_DOMAIN = "DYN_KV_TRANSFER_DOMAIN"
TRANSFER_ENFORCEMENT = "DYN_KV_TRANSFER_ENFORCEMENT"
TRANSFER_WEIGHT = "DYN_KV_TRANSFER_PREFERRED_WEIGHT"
ROUTER_LEVEL = "DYN_ROUTER_KV_TRANSFER_TOPOLOGY_LEVEL"

DEFAULT_MOUNT_PATH = "/etc/dynamo/topology"
DEFAULT_POLL_S = 1.0
DEFAULT_TIMEOUT_S = 30.0

DOMAIN_CHARS_MAX = 63
VALUE_CHARS_MAX = 253


@dataclass(frozen=True, slots=True)
class TopologyEnv:
    """One worker's topology settings. ``awaited_domain`` must have a value before the worker starts.

    ``poll_s`` is the time between two reads of the files, ``timeout_s`` how long a start waits for them.
    ``warnings`` are about settings without effect.
    """

    enabled: bool
    mount_path: Path = Path(DEFAULT_MOUNT_PATH)
    levels: tuple[str, ...] = ()
    awaited_domain: str | None = None
    awaited_by: str = TRANSFER_DOMAIN
    transfer_domain: str | None = None
    enforcement: Enforcement | None = None
    preferred_weight: float | None = None
    poll_s: float = DEFAULT_POLL_S
    timeout_s: float = DEFAULT_TIMEOUT_S
    warnings: tuple[str, ...] = ()


def parse_topology_env(environ: Mapping[str, str]) -> TopologyEnv:
    """Parse ``environ``; raise ConfigError that names the variable.

    A misspelt value is refused and not ignored: a worker with an unknown location makes KV transfers leave
    their zone.
    """
    if not _flag(environ, ENABLED):
        return TopologyEnv(enabled=False, warnings=_unused(environ))
    transfer_domain = _domain(environ, TRANSFER_DOMAIN)
    router_level = _domain(environ, ROUTER_LEVEL)
    if transfer_domain is None and router_level is None:
        raise ConfigError(
            f"{TRANSFER_DOMAIN}: must name the domain of KV transfers when {ENABLED} is true "
            f"(or set {ROUTER_LEVEL} to leave the policy to the router)",
            param=TRANSFER_DOMAIN,
        )
    enforcement, weight, warnings = _policy(environ, has_domain=transfer_domain is not None)
    return TopologyEnv(
        enabled=True,
        mount_path=Path(text_of(environ, MOUNT_PATH) or DEFAULT_MOUNT_PATH),
        levels=_levels(environ),
        awaited_domain=transfer_domain or router_level,
        awaited_by=TRANSFER_DOMAIN if transfer_domain else ROUTER_LEVEL,
        transfer_domain=transfer_domain,
        enforcement=enforcement,
        preferred_weight=weight,
        poll_s=_seconds(environ, POLL_S, default_s=DEFAULT_POLL_S, may_be_zero=False),
        timeout_s=_seconds(environ, TIMEOUT_S, default_s=DEFAULT_TIMEOUT_S, may_be_zero=True),
        warnings=warnings,
    )


def name_problem(name: str) -> str | None:
    """Why ``name`` is no valid domain name, or None. It is a file's name, and ends at ``=`` in a taint."""
    if not name:
        return "is empty"
    if name.startswith("."):
        return "begins with a dot, as hidden files do"
    if len(name) > DOMAIN_CHARS_MAX:
        return f"is longer than {DOMAIN_CHARS_MAX} characters"
    if not name.isprintable() or name != name.strip() or "=" in name or "/" in name:
        return "holds '=', '/', outer blanks or unprintable characters"
    return None


def value_problem(value: str) -> str | None:
    """Why ``value`` (trimmed) cannot be a domain's value; None when it can."""
    if len(value) > VALUE_CHARS_MAX:
        return f"is longer than {VALUE_CHARS_MAX} characters"
    if not value.isprintable():
        return "is not one line of printable characters"
    return None


def _policy(
    environ: Mapping[str, str], *, has_domain: bool
) -> tuple[Enforcement | None, float | None, tuple[str, ...]]:
    stated, weight = _enforcement(environ), _weight(environ)
    if not has_domain:
        unused = [name for name in (TRANSFER_ENFORCEMENT, TRANSFER_WEIGHT) if text_of(environ, name)]
        return None, None, tuple(f"{name} has no effect without {TRANSFER_DOMAIN}" for name in unused)
    enforcement = stated or Enforcement.REQUIRED
    if enforcement is Enforcement.PREFERRED:
        if weight is None:
            raise ConfigError(
                f"{TRANSFER_WEIGHT}: must be set, between 0 and 1, when {TRANSFER_ENFORCEMENT} is preferred",
                param=TRANSFER_WEIGHT,
            )
        return enforcement, weight, ()
    if weight is None:
        return enforcement, None, ()
    return enforcement, None, (f"{TRANSFER_WEIGHT} is only read when {TRANSFER_ENFORCEMENT} is preferred",)


def _unused(environ: Mapping[str, str]) -> tuple[str, ...]:
    names = (TRANSFER_DOMAIN, TRANSFER_ENFORCEMENT, TRANSFER_WEIGHT, LEVELS, MOUNT_PATH)
    return tuple(f"{name} has no effect unless {ENABLED} is true" for name in names if text_of(environ, name))


def _flag(environ: Mapping[str, str], name: str) -> bool:
    text = text_of(environ, name)
    try:
        return bool(text) and parse_switch(text)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}", param=name) from None


def _domain(environ: Mapping[str, str], name: str) -> str | None:
    domain = text_of(environ, name)
    if not domain:
        return None
    problem = name_problem(domain)
    if problem is not None:
        raise ConfigError(f"{name}: {domain!r} cannot be a topology domain: it {problem}", param=name)
    return domain


def _levels(environ: Mapping[str, str]) -> tuple[str, ...]:
    text = text_of(environ, LEVELS)
    levels = tuple(level.strip() for level in text.split(",")) if text else ()
    for level in levels:
        problem = "is there twice" if levels.count(level) > 1 else name_problem(level)
        if problem is not None:
            raise ConfigError(f"{LEVELS}: {level!r} in {text!r} {problem}", param=LEVELS)
    return levels


def _enforcement(environ: Mapping[str, str]) -> Enforcement | None:
    text = text_of(environ, TRANSFER_ENFORCEMENT)
    if not text:
        return None
    try:
        return Enforcement(text)
    except ValueError:
        known = ", ".join(Enforcement)
        raise ConfigError(
            f"{TRANSFER_ENFORCEMENT}: {text!r} is none of {known}", param=TRANSFER_ENFORCEMENT
        ) from None


def _weight(environ: Mapping[str, str]) -> float | None:
    if not text_of(environ, TRANSFER_WEIGHT):
        return None
    weight = _number(environ, TRANSFER_WEIGHT)
    if not 0.0 <= weight <= 1.0:
        raise ConfigError(f"{TRANSFER_WEIGHT}: {weight} is not between 0 and 1", param=TRANSFER_WEIGHT)
    return weight


def _seconds(environ: Mapping[str, str], name: str, *, default_s: float, may_be_zero: bool) -> float:
    if not text_of(environ, name):
        return default_s
    seconds = _number(environ, name)
    if seconds < 0 or (seconds == 0 and not may_be_zero):
        raise ConfigError(f"{name}: {seconds} is no time in seconds to wait", param=name)
    return seconds


def _number(environ: Mapping[str, str], name: str) -> float:
    text = text_of(environ, name)
    try:
        number = float(text)
    except ValueError:
        raise ConfigError(f"{name}: {text!r} is not a number", param=name) from None
    if not math.isfinite(number):
        raise ConfigError(f"{name}: {text!r} is not a finite number", param=name)
    return number

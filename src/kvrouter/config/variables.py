"""Environment variables by name: whose prefix they have, and under which names one is read."""

from collections.abc import Mapping
from typing import Literal, get_args

from kvrouter.core.errors import ConfigError

OUR_PREFIX = "KVROUTER_"
SHARED_PREFIX = "DYN_"
"""The prefix of names that other programs' users know; most variables with it belong to those programs."""

TopologyVariable = Literal[
    "DYN_TOPOLOGY_ENABLED",
    "DYN_TOPOLOGY_MOUNT_PATH",
    "DYN_TOPOLOGY_LEVELS",
    "DYN_TOPOLOGY_POLL_S",
    "DYN_TOPOLOGY_TIMEOUT_S",
    "DYN_KV_TRANSFER_DOMAIN",
    "DYN_KV_TRANSFER_ENFORCEMENT",
    "DYN_KV_TRANSFER_PREFERRED_WEIGHT",
    "DYN_ROUTER_KV_TRANSFER_TOPOLOGY_LEVEL",
]
"""The variables of a worker's topology contract: the last one is a setting of the router too."""

TOPOLOGY_VARIABLES: tuple[str, ...] = get_args(TopologyVariable)


def spellings(variable: str) -> tuple[str, ...]:
    """Return the names under which ``variable`` is read: ``DYN_X`` is ``KVROUTER_X`` too."""
    if variable.startswith(SHARED_PREFIX):
        return variable, OUR_PREFIX + variable.removeprefix(SHARED_PREFIX)
    return (variable,)


def without_prefix(variable: str) -> str:
    """Return the part of a name that says what it is about."""
    for prefix in (OUR_PREFIX, SHARED_PREFIX):
        if variable.startswith(prefix):
            return variable.removeprefix(prefix)
    return variable


def text_of(environ: Mapping[str, str], variable: str) -> str:
    """Return the trimmed text of ``variable`` under whichever of its names it is given; empty when it is not.

    Raises ConfigError that names both when they differ.
    """
    given = {name: text for name in spellings(variable) if (text := environ.get(name, "").strip())}
    if len(set(given.values())) > 1:
        one, other = given
        raise ConfigError(f"{one} and {other} are one setting, and differ: leave one of them out", param=one)
    return next(iter(given.values()), "")

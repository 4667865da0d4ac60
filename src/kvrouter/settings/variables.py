"""Environment variables of settings: their prefixes, their names, and Kubernetes service links.

Unless a pod says ``enableServiceLinks: false``, its containers get variables of every Service of their
namespace. Of one called ``kvrouter``, on ``10.0.0.7`` and with the TCP port 8000 called ``http``, they get ::

    KVROUTER_SERVICE_HOST=10.0.0.7              KVROUTER_PORT_8000_TCP=tcp://10.0.0.7:8000
    KVROUTER_SERVICE_PORT=8000                  KVROUTER_PORT_8000_TCP_PROTO=tcp
    KVROUTER_SERVICE_PORT_HTTP=8000             KVROUTER_PORT_8000_TCP_PORT=8000
    KVROUTER_PORT=tcp://10.0.0.7:8000           KVROUTER_PORT_8000_TCP_ADDR=10.0.0.7

A variable counts as one of these when its name and its value are what a kubelet makes of a Service of which
the others are there too: whatever says something else is somebody's own word.
"""

import re
from collections.abc import Mapping
from typing import Literal, NamedTuple, get_args

from kvrouter.core.errors import ConfigError
from kvrouter.core.hosts import is_address

FLEET_VARIABLE = "KVROUTER_FLEET"
"""The variable behind ``--fleet``: the fleet file, which holds settings rather than being one."""

ENGINE_KEY_VARIABLE = "KVROUTER_ENGINE_API_KEY"
"""The variable with the key that engines' servers ask for, unless an engine has its own. No flag holds a key,
which every process list shows, nor a file that is diffed: a file names a variable or another file."""

ENGINE_KEYS_PREFIX = f"{ENGINE_KEY_VARIABLE}_"
"""Variables with this prefix hold keys of single engines, under any name."""

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
    """Return a name without its prefix."""
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


_HOST = re.compile(r"(?P<service>[A-Z](?:[A-Z0-9_]*[A-Z0-9])?)_SERVICE_HOST")
_PORT_NAME = r"[A-Z0-9](?:[A-Z0-9_]*[A-Z0-9])?"
_PROTOCOLS = ("TCP", "UDP", "SCTP")
_PORT_MAX = 65_535


def without_service_links(environ: Mapping[str, str]) -> dict[str, str]:
    """Return ``environ`` without a kubelet's variables for Services with kvrouter's prefixes."""
    links: set[str] = set()
    for name, host in environ.items():
        found = _HOST.fullmatch(name)
        if found is not None and name.startswith((OUR_PREFIX, SHARED_PREFIX)) and is_address(host):
            links |= _links_of(found["service"], host, environ)
    return {name: value for name, value in environ.items() if name not in links}


def _links_of(service: str, host: str, environ: Mapping[str, str]) -> set[str]:
    """Return the variables of a Service; empty unless its address, and all of one port, are there.

    Its first port may be missing: of Services called ``a`` and ``a-service``, one overwrites the other's.
    """
    ports = _ports_of(service, host, environ)
    if not ports:
        return set()
    links = {f"{service}_SERVICE_HOST"}.union(*(port.names for port in ports))
    if environ.get(f"{service}_PORT") in {port.url for port in ports}:
        links.add(f"{service}_PORT")
    named = re.compile(rf"{service}_SERVICE_PORT(_{_PORT_NAME})?")
    numbers = {port.number for port in ports}
    return links | {name for name, value in environ.items() if value in numbers and named.fullmatch(name)}


class _Port(NamedTuple):
    """A port of a Service, and the variables that are its own."""

    number: str
    url: str
    names: frozenset[str]


def _ports_of(service: str, host: str, environ: Mapping[str, str]) -> list[_Port]:
    """Return the ports with all of their variables, and these variables."""
    at = re.compile(rf"{service}_PORT_(?P<number>[1-9][0-9]{{0,4}})_(?P<protocol>{'|'.join(_PROTOCOLS)})")
    found = []
    for name in environ:
        port_match = at.fullmatch(name)
        if port_match is None or int(port_match["number"]) > _PORT_MAX:
            continue
        number, protocol = port_match["number"], port_match["protocol"].lower()
        url = f"{protocol}://{f'[{host}]' if ':' in host else host}:{number}"
        says = {name: url, f"{name}_PROTO": protocol, f"{name}_PORT": number, f"{name}_ADDR": host}
        if all(environ.get(each) == value for each, value in says.items()):
            found.append(_Port(number, url, frozenset(says)))
    return found

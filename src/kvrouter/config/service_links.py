"""Variables that kubelets make of Services: a Service called ``kvrouter-x`` is no setting of ours.

Unless a pod says ``enableServiceLinks: false``, its containers are told of every Service of their namespace.
Of one called ``kvrouter``, on ``10.0.0.7`` and with the TCP port 8000 called ``http``, they are told ::

    KVROUTER_SERVICE_HOST=10.0.0.7              KVROUTER_PORT_8000_TCP=tcp://10.0.0.7:8000
    KVROUTER_SERVICE_PORT=8000                  KVROUTER_PORT_8000_TCP_PROTO=tcp
    KVROUTER_SERVICE_PORT_HTTP=8000             KVROUTER_PORT_8000_TCP_PORT=8000
    KVROUTER_PORT=tcp://10.0.0.7:8000           KVROUTER_PORT_8000_TCP_ADDR=10.0.0.7

A variable counts as one of these when its name and its value are what a kubelet makes of a Service of which
the others are there too: whatever says something else is somebody's own word.
"""

import re
from collections.abc import Mapping
from ipaddress import ip_address
from typing import NamedTuple

from kvrouter.config.variables import OUR_PREFIX, SHARED_PREFIX

_HOST = re.compile(r"(?P<service>[A-Z](?:[A-Z0-9_]*[A-Z0-9])?)_SERVICE_HOST")
_PORT_NAME = r"[A-Z0-9](?:[A-Z0-9_]*[A-Z0-9])?"
_PROTOCOLS = ("TCP", "UDP", "SCTP")
_PORT_MAX = 65_535


def without_service_links(environ: Mapping[str, str]) -> dict[str, str]:
    """Return ``environ`` without what kubelets say of Services whose names begin as our variables do."""
    links: set[str] = set()
    for name, host in environ.items():
        found = _HOST.fullmatch(name)
        if found is not None and name.startswith((OUR_PREFIX, SHARED_PREFIX)) and _is_address(host):
            links |= _links_of(found["service"], host, environ)
    return {name: value for name, value in environ.items() if name not in links}


def _links_of(service: str, host: str, environ: Mapping[str, str]) -> set[str]:
    """Return the variables of a Service; none unless its address, and all of one port, are there.

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
    """Return those ports all of whose variables are there, with what belongs there."""
    at = re.compile(rf"{service}_PORT_(?P<number>[1-9][0-9]{{0,4}})_(?P<protocol>{'|'.join(_PROTOCOLS)})")
    found = []
    for name in environ:
        told = at.fullmatch(name)
        if told is None or int(told["number"]) > _PORT_MAX:
            continue
        number, protocol = told["number"], told["protocol"].lower()
        url = f"{protocol}://{f'[{host}]' if ':' in host else host}:{number}"
        says = {name: url, f"{name}_PROTO": protocol, f"{name}_PORT": number, f"{name}_ADDR": host}
        if all(environ.get(each) == value for each, value in says.items()):
            found.append(_Port(number, url, frozenset(says)))
    return found


def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True

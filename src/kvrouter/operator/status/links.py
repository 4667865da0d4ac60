"""Links in a status: where they are read, what a page says of them, and which change is one to show."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from ipaddress import ip_address
from typing import NamedTuple

from pydantic import ValidationError

from kvrouter.operator.api.status import LINKS_MAX, LinkStatus
from kvrouter.operator.labels.copies import Pod
from kvrouter.operator.plan.manifest import COMPONENT_LABEL, Manifest
from kvrouter.operator.plan.plan import Plan

LINK_SERIES = "kvrouter_link_"
"""What the lines of a page start with that speak of links."""

ALIKE = 1.25
"""Numbers that differ by less count as the same: routers count links so, too."""

SHORT_S = 1e-4
"""Latencies below it count as the same."""


class Door(NamedTuple):
    """Where a frontend answers, without TLS."""

    address: str
    port: int

    @property
    def metrics(self) -> str:
        """The URL of its metrics."""
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"http://{host}:{self.port}/metrics"


def door_of(planned: Plan, pods: Iterable[Pod]) -> Door | None:
    """Return the door of the first Ready frontend by name, by the port of its Service; None without one."""
    ports = dict(_port_of(each) for each in planned.manifests if each["kind"] == "Service")
    for pod in sorted(pods, key=lambda pod: pod.name):
        port = ports.get(pod.labels.get(COMPONENT_LABEL, ""))
        if port and pod.is_ready and not pod.is_over and pod.address and _is_address(pod.address):
            return Door(pod.address, port)
    return None


def read_links(lines: Iterable[bytes]) -> tuple[LinkStatus, ...]:
    """Return the links of which a page's lines say everything; what is no number or no name is passed over.

    Slow ones come first, then they are in the order of models and names; there are 64 at most.
    """
    said: defaultdict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for line in lines:
        series = _read_series(line)
        if series is not None:
            said[series.of][series.what] = series.value
    found = [link for of, values in said.items() if (link := _link(of, values)) is not None]
    return tuple(sorted(found, key=lambda link: (not link.slow, link.model, link.link))[:LINKS_MAX])


def steadied(shown: Sequence[LinkStatus], found: Sequence[LinkStatus]) -> tuple[LinkStatus, ...]:
    """Return ``found`` with the numbers that were ``shown``, where the new ones are much the same.

    What is learned moves a little with every handoff, and each change of a status goes to all who watch it.
    """
    before = {(link.model, link.link): link for link in shown}
    return tuple(_steady(before.get((link.model, link.link)), link) for link in found)


def _steady(was: LinkStatus | None, link: LinkStatus) -> LinkStatus:
    if was is None or was.slow != link.slow:
        return link
    numbers: dict[str, float] = {}
    if _are_alike(was.bandwidth_bytes_per_second, link.bandwidth_bytes_per_second, least=1.0):
        numbers["bandwidth_bytes_per_second"] = was.bandwidth_bytes_per_second
    if _are_alike(was.latency_seconds, link.latency_seconds, least=SHORT_S):
        numbers["latency_seconds"] = was.latency_seconds
    return link.model_copy(update=numbers)


def _are_alike(one: float, other: float, *, least: float) -> bool:
    low, high = sorted((max(one, least), max(other, least)))
    return high < ALIKE * low


class _Series(NamedTuple):
    """One line: of which model and link, what of them, and how much."""

    of: tuple[str, str]
    what: str
    value: float


_TEXT = r'"((?:[^"\\]|\\["\\n])*+)"'
_NAME = r"(model|link)"
_LINE = re.compile(
    rf"{LINK_SERIES}(bandwidth_bytes_per_second|latency_seconds|slow)"
    rf"\{{{_NAME}={_TEXT},{_NAME}={_TEXT}\}} ([0-9.e+-]{{1,32}})\r?"
)
_ESCAPE = re.compile(r'\\(["\\n])')


def _read_series(line: bytes) -> _Series | None:
    """A line as frontends write it; None for anything else, such as a number that is none."""
    try:
        match = _LINE.fullmatch(line.decode())
        if match is None:
            return None
        what, first, one, second, other, number = match.groups()
        labels = {first: _plain(one), second: _plain(other)}
        value = float(number)
    except ValueError:
        return None
    if len(labels) != 2 or not all(text and text.isprintable() for text in labels.values()):
        return None
    return _Series((labels["model"], labels["link"]), what, value)


def _plain(text: str) -> str:
    return _ESCAPE.sub(lambda match: "\n" if match[1] == "n" else match[1], text)


def _link(of: tuple[str, str], values: Mapping[str, float]) -> LinkStatus | None:
    """One link, with its numbers to two digits; None where one lacks or is none that a link can have."""
    try:
        return LinkStatus(
            model=of[0],
            link=of[1],
            bandwidth_bytes_per_second=int(_rounded(values["bandwidth_bytes_per_second"])),
            latency_seconds=_rounded(values["latency_seconds"]),
            slow={0.0: False, 1.0: True}[values["slow"]],
        )
    except (KeyError, OverflowError, ValidationError):
        return None


def _rounded(value: float) -> float:
    return float(f"{value:.1e}")


def _port_of(service: Manifest) -> tuple[str, int]:
    """The component of a Service as it is planned, and the port of its pods."""
    match service:
        case {
            "metadata": {"labels": dict(labels)},
            "spec": {"ports": [{"targetPort": int(port)}]},
        }:
            return str(labels.get(COMPONENT_LABEL)), port
    raise TypeError(f"no Service as they are planned: {service}")


def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True

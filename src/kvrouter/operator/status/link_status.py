"""Links in a status: where they are read, how a page is parsed, and which changes are shown."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from pydantic import ValidationError

from kvrouter.core.hosts import is_address
from kvrouter.operator.api.status import LINKS_MAX, LinkStatus
from kvrouter.operator.labels.pods import Pod
from kvrouter.operator.plan.manifest import COMPONENT_LABEL, Manifest
from kvrouter.operator.plan.plan import Plan

LINK_SERIES = "kvrouter_link_"
"""The start of the lines about links on a page of metrics."""

SAME_WITHIN = 1.25
"""Numbers that differ by less than this factor count as the same; routers use it too."""

SHORT_S = 1e-4
"""Latencies below it count as the same, in seconds."""


class MetricsEndpoint(NamedTuple):
    """The address and port at which a frontend serves its metrics, without TLS."""

    address: str
    port: int

    @property
    def url(self) -> str:
        """The URL of the page."""
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"http://{host}:{self.port}/metrics"


def metrics_endpoint(planned: Plan, pods: Iterable[Pod]) -> MetricsEndpoint | None:
    """Return the pod address and port of the first Ready frontend by name; None if there is none."""
    ports = dict(_port_of(each) for each in planned.manifests if each["kind"] == "Service")
    for pod in sorted(pods, key=lambda pod: pod.name):
        port = ports.get(pod.labels.get(COMPONENT_LABEL, ""))
        if port and pod.is_ready and not pod.is_over and pod.address and is_address(pod.address):
            return MetricsEndpoint(pod.address, port)
    return None


def read_links(lines: Iterable[bytes]) -> tuple[LinkStatus, ...]:
    """Return the complete links on a page; lines without a valid name or number are skipped.

    Slow links come first, then the order is by model and name; there are 64 at most.
    """
    values_of: defaultdict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for line in lines:
        series = _read_series(line)
        if series is not None:
            values_of[series.of][series.what] = series.value
    found = [link for of, values in values_of.items() if (link := _link(of, values)) is not None]
    return tuple(sorted(found, key=lambda link: (not link.slow, link.model, link.link))[:LINKS_MAX])


def steadied(shown: Sequence[LinkStatus], found: Sequence[LinkStatus]) -> tuple[LinkStatus, ...]:
    """Return ``found`` with the ``shown`` numbers where the new ones are about the same.

    Learned numbers move a little with every handoff, and each change of a status goes to all its watchers.
    """
    before = {(link.model, link.link): link for link in shown}
    return tuple(_steady(before.get((link.model, link.link)), link) for link in found)


def _steady(was: LinkStatus | None, link: LinkStatus) -> LinkStatus:
    if was is None or was.slow != link.slow:
        return link
    numbers: dict[str, float] = {}
    if _are_close(was.bandwidth_bytes_per_second, link.bandwidth_bytes_per_second, least=1.0):
        numbers["bandwidth_bytes_per_second"] = was.bandwidth_bytes_per_second
    if _are_close(was.latency_seconds, link.latency_seconds, least=SHORT_S):
        numbers["latency_seconds"] = was.latency_seconds
    return link.model_copy(update=numbers)


def _are_close(one: float, other: float, *, least: float) -> bool:
    low, high = sorted((max(one, least), max(other, least)))
    return high < SAME_WITHIN * low


class _Series(NamedTuple):
    """One line: its model and link, the quantity, and the value."""

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
    """Parse a line as frontends write it; None for any other line."""
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
    """Return one link, its numbers rounded to two digits; None if one is missing or out of range."""
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
    """Return the component of a planned Service, and the port of its pods."""
    match service:
        case {
            "metadata": {"labels": dict(labels)},
            "spec": {"ports": [{"targetPort": int(port)}]},
        }:
            return str(labels.get(COMPONENT_LABEL)), port
    raise TypeError(f"no Service as they are planned: {service}")

"""Engines in network namespaces of their own, and the rates at which KV reaches each of them.

Each engine has two devices: ``ctl0`` for calls, events and metrics, and ``kv0`` for KV. All ``kv0`` are ports
of one switch, which stands in a namespace too. What leaves the switch towards an engine is shaped by tc's
``tbf``, so the link to one engine may be slow while its calls are not.

It needs root that may make namespaces, and ``ip`` and ``tc``.
"""

import asyncio
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

CTL_DEVICE = "ctl0"
KV_DEVICE = "kv0"
SWITCH = "sw"
BRIDGE = "br0"
NEEDS = "needs root that may make network namespaces (CAP_SYS_ADMIN, CAP_NET_ADMIN), ip and tc"


class CannotShape(Exception):
    """This process may make no namespaces here, or lacks the programs for it."""


@dataclass(frozen=True)
class Station:
    """One engine's place: its namespace, and its addresses for calls and for KV."""

    name: str
    namespace: str
    port: str
    """The switch's device towards it."""
    host: str
    kv_host: str

    @property
    def prefix(self) -> tuple[str, ...]:
        """What runs a command there."""
        return ("ip", "netns", "exec", self.namespace)


class ShapedNetwork:
    """Stations by name, and one switch. ``tag`` keeps two of them on one machine apart."""

    def __init__(self, names: Sequence[str]) -> None:
        self.tag = f"kvr{os.getpid() % 100_000}"
        self._switch = f"{self.tag}-{SWITCH}"
        self.stations = {
            name: Station(
                name=name,
                namespace=f"{self.tag}-{name}",
                port=f"p-{name}",
                host=f"10.213.{100 + number}.2",
                kv_host=f"10.213.1.{number}",
            )
            for number, name in enumerate(names, start=1)
        }
        self._shaped: set[str] = set()

    async def begin(self) -> None:
        """Make the namespaces and join them."""
        await self._ip("netns", "add", self._switch)
        await self._ip("-n", self._switch, "link", "add", BRIDGE, "type", "bridge")
        await self._ip("-n", self._switch, "link", "set", BRIDGE, "up")
        for number, station in enumerate(self.stations.values()):
            await self._join(number, station)

    async def end(self) -> None:
        """Take away whatever there is: devices go with their namespaces."""
        for name in (self._switch, *(station.namespace for station in self.stations.values())):
            await _run(("ip", "netns", "del", name), may_fail=True)

    async def shape(self, name: str, rate_mbit: float) -> None:
        """Let KV reach a station no faster than this."""
        verb = "change" if name in self._shaped else "add"
        self._shaped.add(name)
        await _run(
            (
                *("tc", "-n", self._switch, "qdisc", verb, "dev", self.stations[name].port, "root"),
                *("tbf", *_tbf(rate_mbit)),
            )
        )

    async def _join(self, number: int, station: Station) -> None:
        inside, outside = station.namespace, f"{self.tag}c{number}"
        await self._ip("netns", "add", inside)
        await self._ip("-n", inside, "link", "set", "lo", "up")
        await self._ip("link", "add", outside, "type", "veth", "peer", "name", CTL_DEVICE, "netns", inside)
        await self._ip("addr", "add", f"{station.host[:-1]}1/30", "dev", outside)
        await self._ip("link", "set", outside, "up")
        await self._ip("-n", inside, "addr", "add", f"{station.host}/30", "dev", CTL_DEVICE)
        await self._ip("-n", inside, "link", "set", CTL_DEVICE, "up")
        await self._ip(
            *("-n", self._switch, "link", "add", station.port, "type", "veth"),
            *("peer", "name", KV_DEVICE, "netns", inside),
        )
        await self._ip("-n", self._switch, "link", "set", station.port, "master", BRIDGE, "up")
        await self._ip("-n", inside, "addr", "add", f"{station.kv_host}/24", "dev", KV_DEVICE)
        await self._ip("-n", inside, "link", "set", KV_DEVICE, "up")

    async def _ip(self, *arguments: str) -> None:
        await _run(("ip", *arguments))


def why_not() -> str | None:
    """Why this process cannot shape links; None where it can. It makes a namespace to see, and removes it."""
    missing = [program for program in ("ip", "tc") if shutil.which(program) is None]
    if missing or os.geteuid() != 0:
        return f"{NEEDS}: {', '.join(missing) + ' is missing' if missing else 'this is not root'}"
    namespace = f"kvr{os.getpid()}-try"
    shape = ("tc", "-n", namespace, "qdisc", "add", "dev", "lo", "root", "tbf", *_tbf(1.0))
    try:
        for command in (("ip", "netns", "add", namespace), shape):
            done = subprocess.run(command, check=False, capture_output=True, text=True)
            if done.returncode:
                return f"{NEEDS}: {' '.join(command)}: {done.stderr.strip()}"
        return None
    finally:
        subprocess.run(("ip", "netns", "del", namespace), check=False, capture_output=True)


@asynccontextmanager
async def shaped_network(*names: str) -> AsyncIterator[ShapedNetwork]:
    """A network with a station of each name, and its end. Raises CannotShape where it cannot be made."""
    reason = why_not()
    if reason is not None:
        raise CannotShape(reason)
    network = ShapedNetwork(names)
    try:
        await network.begin()
        yield network
    finally:
        await network.end()


def _tbf(rate_mbit: float) -> tuple[str, ...]:
    return ("rate", f"{rate_mbit:g}mbit", "burst", "64kb", "limit", "4mb")


async def _run(command: Sequence[str], *, may_fail: bool = False) -> None:
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    _, said = await process.communicate()
    if process.returncode and not may_fail:
        raise CannotShape(f"{NEEDS}: {' '.join(command)}: {said.decode(errors='replace').strip()}")

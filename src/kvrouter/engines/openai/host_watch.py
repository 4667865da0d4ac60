"""A watch over an engine's connections: they fail once the engine's host is lost."""

import asyncio
import socket
import sys
from struct import Struct
from weakref import WeakSet

import aiohttp

_TCP_INFO = Struct("=3x B 20x I 116x I")
"""``tcpi_probes``, ``tcpi_unacked`` and ``tcpi_notsent_bytes`` of Linux's ``tcp_info``."""

_PROBES_MAX = 3
"""A host that has answered none of so many probes in a row acknowledges nothing."""


class HostWatch:
    """Makes sockets whose connections fail with ETIMEDOUT once their host acknowledges nothing for ``lost_s``
    seconds.

    A host acknowledges also for a server that is frozen or busy, and answers probes once that has no room for
    more. TCP_USER_TIMEOUT counts this time too, so it is off meanwhile, as a look at each socket shows: bytes
    wait to be sent, and all that were sent are acknowledged. On other systems than Linux their own limits
    hold.
    """

    def __init__(self, lost_s: float) -> None:
        self._lost_s = lost_s
        self._sockets: WeakSet[socket.socket] = WeakSet()
        self._timer: asyncio.TimerHandle | None = None

    def new_socket(self, address: aiohttp.AddrInfoType) -> socket.socket:
        """Return a socket of the watch."""
        family, kind, protocol, _, _ = address
        new = socket.socket(family, kind, protocol)
        if sys.platform == "linux":
            probe_each_s = max(1, int(self._lost_s / 3))
            new.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            new.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, probe_each_s)
            new.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, probe_each_s)
            self._limit(new)
            self._sockets.add(new)
            if self._timer is None:
                self._look_later()
        return new

    def close(self) -> None:
        """Look no more. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._lost_s / 3, self._look)

    def _look(self) -> None:
        self._timer = None
        for each in tuple(self._sockets):
            if each.fileno() < 0:
                self._sockets.discard(each)
            else:
                self._limit(each)
        if self._sockets:
            self._look_later()

    def _limit(self, each: socket.socket) -> None:
        if sys.platform == "linux":
            n_probes, unacknowledged, unsent_bytes = _TCP_INFO.unpack(
                each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
            )
            has_no_room = unsent_bytes and not unacknowledged and n_probes < _PROBES_MAX
            limit_s = 0.0 if has_no_room else self._lost_s
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * limit_s))

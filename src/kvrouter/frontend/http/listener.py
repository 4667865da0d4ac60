"""A listening socket that accepts by itself, so that nobody is turned away without an answer.

An event loop's own server takes whatever waits in one go. When that is more than there are file descriptors,
it closes the rest unheard: a connection that was refused gives its descriptor back only after that. Here each
connection is judged as it is accepted, and one that is refused is answered and closed on the spot.
"""

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import Callable

__all__ = ["Listener"]

ACCEPTED_AT_ONCE = 64
"""Connections that are accepted before everything else on the event loop gets its turn."""

WITHOUT_DESCRIPTORS_S = 0.2
"""How long accepting rests when the last descriptor cannot be had either."""

_NONE_LEFT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Listener:
    """Accepts on ``sock``, which is closed at the end, and hands each connection to ``take``.

    When the process has no file descriptor left, one that is kept for this is given up for a moment, and
    ``answer`` gets the connection, to write what it must without waiting.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        loop: asyncio.AbstractEventLoop,
        take: Callable[[socket.socket], None],
        answer: Callable[[socket.socket], None],
    ) -> None:
        self._sock = sock
        self._loop = loop
        self._take = take
        self._answer = answer
        self._kept = self._keep()
        self._resting: asyncio.TimerHandle | None = None
        sock.setblocking(False)
        loop.add_reader(sock.fileno(), self._accept)

    @property
    def address(self) -> tuple[str, int]:
        """(host, port)."""
        name = self._sock.getsockname()
        return str(name[0]), int(name[1])

    def close(self) -> None:
        """Listen no more. Idempotent."""
        if self._sock.fileno() < 0:
            return
        if self._resting is not None:
            self._resting.cancel()
        self._loop.remove_reader(self._sock.fileno())
        self._sock.close()
        self._give_up_kept()

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                sock, _ = self._sock.accept()
            except ConnectionAbortedError:
                continue
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno not in _NONE_LEFT:
                    raise
                if not self._turn_one_away():
                    self._rest()
                    return
                continue
            sock.setblocking(False)
            self._take(sock)

    def _turn_one_away(self) -> bool:
        """Answer one connection under the descriptor that is kept; False when there is none."""
        if self._kept is None:
            self._kept = self._keep()
            return self._kept is not None
        self._give_up_kept()
        try:
            sock, _ = self._sock.accept()
        except OSError as error:
            return error.errno not in _NONE_LEFT
        else:
            sock.setblocking(False)
            self._answer(sock)
            return True
        finally:
            self._kept = self._keep()

    def _rest(self) -> None:
        self._loop.remove_reader(self._sock.fileno())
        self._resting = self._loop.call_later(
            WITHOUT_DESCRIPTORS_S, self._loop.add_reader, self._sock.fileno(), self._accept
        )

    def _keep(self) -> int | None:
        with contextlib.suppress(OSError):
            return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        return None

    def _give_up_kept(self) -> None:
        if self._kept is not None:
            os.close(self._kept)
            self._kept = None

"""``kvrouter top`` at a terminal: what ends it, and that the terminal is then as it was."""

import asyncio
import os
import pty
import select
import signal
import sys
import termios
import threading
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import FrameType
from typing import Any

import pytest

from kvrouter.cli.top.run import SIGNAL_WAIT_S, Keys
from tests.testing.mock_fleet import zoned_fleet
from tests.testing.mock_server import mock_server
from tests.testing.processes import ENDS_WITHIN_S, default_signals
from tests.testing.tcp_proxy import TcpProxy
from tests.testing.waits import until

LIMIT_S = 60.0

LEFT_SCREEN = b"\x1b[?1049l"
"""The escape by which a program returns from the whole terminal to what was there before."""


class Terminal:
    """A terminal with ``kvrouter top`` in it, which asks through ``router``. All that the program writes is
    read at once: it must not wait for its reader.
    """

    def __init__(self, user: int, program: int, top: Process, router: TcpProxy) -> None:
        self.user = user
        self.program = program
        self.top = top
        self.router = router
        self._shown = b""
        self._has_more = asyncio.Event()
        os.set_blocking(user, False)
        asyncio.get_running_loop().add_reader(user, self._read)

    def _read(self) -> None:
        self._shown += os.read(self.user, 65536)
        self._has_more.set()

    async def shown_until(self, text: bytes, *, times: int = 1) -> bytes:
        """Return all that the program writes until it wrote ``text`` so many times."""
        async with asyncio.timeout(LIMIT_S):
            while self._shown.count(text) < times:
                self._has_more.clear()
                await self._has_more.wait()
        shown, self._shown = self._shown, b""
        return shown

    async def ended(self) -> int:
        """Return the program's exit code."""
        async with asyncio.timeout(ENDS_WITHIN_S):
            return await self.top.wait()

    def modes(self) -> list[object]:
        return termios.tcgetattr(self.program)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self.user)


def _address(url: str) -> tuple[str, int]:
    host, port = url.removeprefix("http://").split(":")
    return host, int(port)


@asynccontextmanager
async def running_top(
    *, has_keys: bool = True, interval_s: float = 60.0
) -> AsyncIterator[tuple[Terminal, list[object]]]:
    """Run it before a mock fleet; yield it with the terminal's modes from before."""
    user, program = pty.openpty()
    before = termios.tcgetattr(program)
    async with mock_server(zoned_fleet()) as here, TcpProxy(*_address(here.url)) as router:
        url = f"http://127.0.0.1:{router.port}"
        top = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kvrouter", "top", "--url", url, "--interval-s", str(interval_s)),
            stdin=program if has_keys else DEVNULL,
            stdout=program,
            stderr=program,
            env={**os.environ, "TERM": "xterm-256color"},
            preexec_fn=default_signals,
        )
        terminal = Terminal(user, program, top, router)
        try:
            yield terminal, before
        finally:
            if top.returncode is None:
                top.kill()
                await top.wait()
            terminal.close()
            os.close(program)
            os.close(user)


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        (b"q", 0),
        (b"x\x1b[AQ", 0),
        (signal.SIGINT, 0),
        *((number, 128 + number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)),
    ],
)
async def test_terminal_is_as_before_however_top_ends(ending: bytes | signal.Signals, code: int) -> None:
    async with running_top() as (terminal, before):
        await terminal.shown_until(b"q ends it")
        assert terminal.modes() != before, "keys come one by one, and are not shown"
        if isinstance(ending, bytes):
            os.write(terminal.user, ending)
        else:
            terminal.top.send_signal(ending)
        assert await terminal.ended() == code
        assert terminal.modes() == before
        assert LEFT_SCREEN in await terminal.shown_until(LEFT_SCREEN)


async def test_q_ends_top_while_the_router_does_not_answer() -> None:
    async with running_top(interval_s=0.2) as (terminal, _):
        await terminal.shown_until(b"q ends it")
        terminal.router.pause()
        n_asked = terminal.router.n_accepted
        await until(lambda: terminal.router.n_accepted > n_asked)
        os.write(terminal.user, b"q")
        assert await terminal.ended() == 0
        assert b"not reachable" not in await terminal.shown_until(LEFT_SCREEN)


async def test_top_without_a_keyboard_leaves_the_terminal_alone() -> None:
    async with running_top(has_keys=False, interval_s=0.2) as (terminal, before):
        os.write(terminal.user, b"q")
        assert b"q ends it" not in await terminal.shown_until(b"6 of 6 workers", times=4)
        assert terminal.modes() == before
        terminal.top.send_signal(signal.SIGINT)
        assert await terminal.ended() == 0


class Ended(Exception):
    """Raised by the handler of a signal."""


def _end(_number: int, _frame: FrameType | None) -> None:
    raise Ended


def test_a_signal_that_interrupts_no_wait_for_a_key_ends_it_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait does not see a signal that came just before it, nor one that another thread gets, as here."""
    before = signal.signal(signal.SIGUSR1, _end)
    wait, is_waiting, is_over = select.select, threading.Event(), threading.Event()
    waits: list[float] = []

    def watched(*args: Any) -> Any:
        waits.append(args[-1])
        is_waiting.set()
        return wait(*args)

    def get_signal() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
        is_waiting.wait()
        os.kill(os.getpid(), signal.SIGUSR1)
        is_over.wait()

    monkeypatch.setattr(select, "select", watched)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    other = threading.Thread(target=get_signal)
    other.start()
    try:
        with pytest.raises(Ended):
            Keys(is_terminal=False).is_pressed("q", within_s=20 * SIGNAL_WAIT_S)
        assert waits == [SIGNAL_WAIT_S], "the wait that was under way is the last"
    finally:
        is_over.set()
        other.join()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
        signal.signal(signal.SIGUSR1, before)

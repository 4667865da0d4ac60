"""A TCP proxy that a test puts between two ends, to take the network away from them.

::

    async with Proxy("127.0.0.1", port) as proxy:
        ...connect to proxy.port instead...
        proxy.pause()    # connections stay open, nothing passes: a partition, a peer that is half open
        proxy.resume()   # what waited passes
        proxy.cut()      # every connection is reset
"""

import asyncio
from collections import deque
from types import TracebackType
from typing import Self

from tests.testing.asyncio_servers import port_of, stop_listening

READ_BYTES = 64 * 1024


class TcpProxy:
    """Passes bytes both ways between whoever connects to ``listen_host:port`` and ``host:target_port``.

    ``delay_s`` is added to whatever passes; while it waits, nothing else of that direction passes. A paused
    proxy still accepts connections. One that is closed and started again needs a ``port`` that the kernel
    gives to no connection meanwhile, as those of ``free_ports``; 0: any.
    """

    def __init__(
        self,
        host: str,
        target_port: int,
        *,
        listen_host: str = "127.0.0.1",
        port: int = 0,
        delay_s: float = 0.0,
    ) -> None:
        self.delay_s = delay_s
        self.port = port
        self.n_accepted = 0
        self._targets = deque([(host, target_port)])
        self._listen_host = listen_host
        self._passes = asyncio.Event()
        self._passes.set()
        self._listener: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._connecting: set[asyncio.Task[tuple[asyncio.StreamReader, asyncio.StreamWriter]]] = set()
        self._change = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, port: int = 0) -> None:
        """Listen on ``port``; 0: any."""
        self._listener = await asyncio.start_server(self._accept, self._listen_host, port)
        self.port = port_of(self._listener)

    def take_turns(self, *ports: int) -> None:
        """Lead each new connection to the next of these ports, as a service before several servers does."""
        host, _ = self._targets[0]
        self._targets = deque((host, port) for port in ports)

    @property
    def n_open(self) -> int:
        """How many ends of connections are open."""
        return len(self._writers)

    async def changed(self) -> None:
        """Wait until an end is closed."""
        self._change.clear()
        await self._change.wait()

    def pause(self) -> None:
        """Pass nothing on; connections stay as they are."""
        self._passes.clear()

    def resume(self) -> None:
        """Pass on what waited, and what comes."""
        self._passes.set()

    def cut(self) -> None:
        """Reset every connection, those that are being made included; what waited in them is lost."""
        for writer in tuple(self._writers):
            writer.transport.abort()
        for task in (*self._connecting, *self._tasks):
            task.cancel()

    async def close(self) -> None:
        """Cut, and listen no longer."""
        if self._listener is not None:
            await stop_listening(self._listener)
        self.cut()
        if tasks := {*self._connecting, *self._tasks}:
            await asyncio.wait(tasks)

    def target(self) -> tuple[str, int]:
        """Where the next connection is led. Raises OSError when it is led nowhere."""
        self._targets.rotate(-1)
        return self._targets[-1]

    async def __aenter__(self) -> Self:
        await self.start(self.port)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.n_accepted += 1
        self._writers.add(writer)
        connecting = asyncio.create_task(self._connect())
        self._connecting.add(connecting)
        await asyncio.wait([connecting])
        self._connecting.discard(connecting)
        try:
            there_reader, there_writer = connecting.result()
        except (OSError, asyncio.CancelledError):
            writer.transport.abort()
            self._writers.discard(writer)
            return
        for one_end, other_end in ((reader, there_writer), (there_reader, writer)):
            task = asyncio.create_task(self._pass(one_end, other_end))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(*self.target())
        self._writers.add(writer)
        return reader, writer

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(READ_BYTES):
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                await self._passes.wait()
                writer.write(data)
                await writer.drain()
            await self._passes.wait()  # a paused network tells nobody that a connection was closed
        except OSError:
            writer.transport.abort()
        finally:
            writer.close()
            self._writers.discard(writer)
            self._change.set()

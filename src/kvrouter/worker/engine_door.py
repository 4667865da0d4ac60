"""The engine door: where an engine of another process tells its worker which blocks it holds.

The engine's end is ``native/c`` (``kvrouter.h``). Whatever comes through the door goes to the worker's
:class:`~kvrouter.worker.publisher.KvPublisher`, so the engine need not know of any event plane.
"""

import asyncio
import hmac
import logging
import re
from collections.abc import Sequence

from kvrouter.core.errors import ConfigError, ProtocolError
from kvrouter.core.ids import DpRank
from kvrouter.telemetry import Event, log_event
from kvrouter.telemetry.seldom import Seldom
from kvrouter.worker.door_address import DoorAddress
from kvrouter.worker.engine_frames import (
    LENGTH_BYTES,
    VERSION,
    EngineFrame,
    Hello,
    LoadFrame,
    Refused,
    RemovedFrame,
    Replace,
    StoredFrame,
    Sync,
    Synced,
    Welcome,
    decode_frame,
    encode_reply,
)
from kvrouter.worker.mirror import FIRST_RANK
from kvrouter.worker.publisher import KvPublisher

FRAME_BYTES_MAX = 1024 * 1024
TOKEN_BYTES_MAX = 1024
CONNECTIONS_MAX = 64

GREETING_S = 5.0
"""Who does not show the token within this time is turned away."""

SILENCE_S = 10.0
"""An engine speaks every second; one that says nothing for this long is gone."""

_NUMBER = re.compile(r"\d+")

_log = logging.getLogger(__name__)


class _Ended(Exception):
    """A conversation is over; the reason is for the log, and for the engine when it is ``told``."""

    def __init__(self, reason: str, *, told: bool = True) -> None:
        super().__init__(reason)
        self.reason = reason
        self.told = told


class _Engine:
    """One connection, and the ranks that it tells of."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.ranks: set[DpRank] = set()
        self.is_greeted = False
        self.ended: _Ended | None = None

    async def frame(self, *, bytes_max: int, limit_s: float) -> bytes:
        """The next frame. Raises _Ended when it is too long, too late, or will never come."""
        try:
            async with asyncio.timeout(limit_s):
                n_bytes = int.from_bytes(await self.reader.readexactly(LENGTH_BYTES), "big")
                if n_bytes > bytes_max:
                    raise _Ended(f"a frame of {n_bytes} bytes is longer than {bytes_max}")
                return await self.reader.readexactly(n_bytes)
        except TimeoutError:
            raise _Ended(f"it said nothing for {limit_s:g} s") from None
        except (asyncio.IncompleteReadError, OSError):
            raise _Ended("its connection ended", told=False) from None

    async def say(self, reply: Welcome | Synced, *, limit_s: float) -> None:
        """Answer. Raises _Ended when the engine does not take it."""
        try:
            async with asyncio.timeout(limit_s):
                self.writer.write(encode_reply(reply))
                await self.writer.drain()
        except TimeoutError:
            raise _Ended(f"it took no answer for {limit_s:g} s", told=False) from None
        except OSError:
            raise _Ended("its connection ended", told=False) from None

    def leave(self, ended: _Ended) -> None:
        """Close, and say why where that can still be said. Only the first reason counts."""
        if self.ended is not None:
            return
        self.ended = ended
        if ended.told and not self.writer.is_closing():
            self.writer.write(encode_reply(Refused(ended.reason)))
        self.writer.close()


class EngineDoor:
    """Lets engines of other processes in; ``start``, ``stop``. Use it from the publisher's event loop.

    ``address`` is ``unix:/path`` (only this user may knock) or ``tcp://host:port`` (port 0: any free one); a
    host beyond loopback needs a ``token``, which an engine must show before anything that it says is read.
    ``block_size`` is the worker's, in tokens; ``dp_ranks`` are the ranks that it has.

    One connection tells of a rank, the newest that claims it. When it ends, for whatever reason, its ranks
    are cleared at once: an engine that died holds nothing, and one that lives tells everything again.
    """

    def __init__(
        self,
        publisher: KvPublisher,
        *,
        address: str,
        block_size: int,
        token: str = "",
        dp_ranks: Sequence[DpRank] = (FIRST_RANK,),
        greeting_s: float = GREETING_S,
        silence_s: float = SILENCE_S,
        frame_bytes_max: int = FRAME_BYTES_MAX,
        connections_max: int = CONNECTIONS_MAX,
    ) -> None:
        self._publisher = publisher
        self._place = DoorAddress.parse(address)
        if not token and not self._place.is_private:
            raise ConfigError(
                f"token: must be set for {address}, which others than this host can reach", param="token"
            )
        self._token = token.encode()
        if len(self._token) > TOKEN_BYTES_MAX:
            raise ConfigError(f"token: is longer than {TOKEN_BYTES_MAX} bytes", param="token")
        self._block_size = block_size
        self._dp_ranks = frozenset(dp_ranks)
        self._greeting_s = greeting_s
        self._silence_s = silence_s
        self._frame_bytes_max = frame_bytes_max
        self._connections_max = connections_max
        self._server: asyncio.Server | None = None
        self._engines: dict[_Engine, asyncio.Task[None]] = {}
        self._owners: dict[DpRank, _Engine] = {}
        self._seldom = Seldom()

    @property
    def address(self) -> str:
        """Where engines knock: with the port that was found, once started."""
        return str(self._place)

    @property
    def dp_ranks(self) -> frozenset[DpRank]:
        """The ranks that an engine tells of now."""
        return frozenset(self._owners)

    async def start(self) -> None:
        """Open the door. Raises ConfigError when the address cannot be had."""
        sock = self._place.listen()
        self._place = self._place.bound_to(sock)
        start = asyncio.start_server if self._place.path is None else asyncio.start_unix_server
        self._server = await start(self._on_knock, sock=sock)

    async def stop(self) -> None:
        """Close the door; what the engines held is cleared. Idempotent."""
        if self._server is None:
            return
        self._server.close()
        tasks = tuple(self._engines.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._server.wait_closed()
        self._server = None
        self._place.forget()

    def _on_knock(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        engine = _Engine(reader, writer)
        if len(self._engines) >= self._connections_max:
            engine.leave(_Ended(f"{self._connections_max} connections are open already"))
            self._log_end(engine)
            return
        task = asyncio.get_running_loop().create_task(self._serve(engine))
        self._engines[engine] = task
        task.add_done_callback(self._report)

    async def _serve(self, engine: _Engine) -> None:
        ended = _Ended("the worker's door is closed")
        try:
            await self._greet(engine)
            while engine.ended is None:
                await self._take(engine)
        except _Ended as why:
            ended = why
        except ProtocolError as error:
            ended = _Ended(error.message)
        finally:
            del self._engines[engine]
            self._release(engine)
            engine.leave(ended)
            self._log_end(engine)

    async def _greet(self, engine: _Engine) -> None:
        shown = await engine.frame(bytes_max=TOKEN_BYTES_MAX, limit_s=self._greeting_s)
        if not hmac.compare_digest(shown, self._token):
            raise _Ended("its token is not the worker's")
        hello = decode_frame(
            await engine.frame(bytes_max=self._frame_bytes_max, limit_s=self._greeting_s),
        )
        if not isinstance(hello, Hello):
            raise _Ended("it does not begin with a hello")
        if hello.version != VERSION:
            raise _Ended(f"it speaks version {hello.version}, the worker {VERSION}")
        if hello.block_size != self._block_size:
            raise _Ended(f"its block_size is {hello.block_size} tokens, the worker's {self._block_size}")
        await engine.say(Welcome(VERSION), limit_s=self._greeting_s)
        engine.is_greeted = True
        log_event(_log, Event.ENGINE_JOINED, worker=str(self._publisher.worker_id))

    async def _take(self, engine: _Engine) -> None:
        frame = decode_frame(
            await engine.frame(bytes_max=self._frame_bytes_max, limit_s=self._silence_s),
        )
        if isinstance(frame, Sync):
            self._publisher.flush()
            await engine.say(Synced(frame.goal), limit_s=self._silence_s)
        elif isinstance(frame, Hello):
            raise _Ended("it says hello twice")
        else:
            self._apply(engine, frame)

    def _apply(self, engine: _Engine, frame: EngineFrame) -> None:
        match frame:
            case Replace():
                self._claim(engine, DpRank(frame.dp_rank))
            case StoredFrame() | RemovedFrame():
                dp_rank = self._owned(engine, frame.dp_rank)
                try:
                    event = frame.event()
                except ValueError as error:
                    raise _Ended(str(error)) from None
                self._publisher.publish(dp_rank, (event,))
            case LoadFrame():
                self._publisher.publish_load(
                    dp_rank=self._owned(engine, frame.dp_rank),
                    active_blocks=frame.active_blocks,
                    total_blocks=frame.total_blocks,
                    active_prefill_tokens=frame.active_prefill_tokens,
                    running_requests=frame.running_requests,
                    waiting_requests=frame.waiting_requests,
                )

    def _claim(self, engine: _Engine, dp_rank: DpRank) -> None:
        if dp_rank not in self._dp_ranks:
            raise _Ended(f"the worker has no dp_rank {dp_rank}")
        owner = self._owners.get(dp_rank)
        if owner is not None and owner is not engine:
            self._release(owner)
            owner.leave(_Ended(f"a newer connection tells of dp_rank {dp_rank}"))
        self._owners[dp_rank] = engine
        engine.ranks.add(dp_rank)
        self._publisher.publish_cleared(dp_rank=dp_rank)

    def _owned(self, engine: _Engine, dp_rank: int) -> DpRank:
        if dp_rank not in engine.ranks:
            raise _Ended(f"it tells of dp_rank {dp_rank}, which it did not claim")
        return DpRank(dp_rank)

    def _release(self, engine: _Engine) -> None:
        for dp_rank in engine.ranks:
            del self._owners[dp_rank]
            self._publisher.publish_cleared(dp_rank=dp_rank)
            self._publisher.drop_load(dp_rank=dp_rank)
        engine.ranks.clear()

    def _log_end(self, engine: _Engine) -> None:
        """Who is refused knocks again for ever: that is told once in a while, whatever numbers it names."""
        reason = "" if engine.ended is None else engine.ended.reason
        if not engine.is_greeted and not self._seldom.allows(_NUMBER.sub("", reason)):
            return
        event = Event.ENGINE_LEFT if engine.is_greeted else Event.ENGINE_REFUSED
        log_event(_log, event, worker=str(self._publisher.worker_id), reason=reason)

    def _report(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log_event(_log, Event.INTERNAL_ERROR, worker=str(self._publisher.worker_id), exc_info=error)

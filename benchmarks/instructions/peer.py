"""The client and the engines of the counted frontend, in step with it, so that each count is the same.

An engine brings a token, and the client sends a request, only while the counted process waits for one. So no
two things arrive together that did not in another run.
"""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

from benchmarks.frontend.client import TEXTS, AnswerFailed, chat_request, prompt_of
from benchmarks.frontend.ticker import N_WORDS
from benchmarks.frontend.worker import NAMESPACE, fail, serve
from benchmarks.instructions.marks import PUT_OFF_S
from kvrouter.core.ids import WorkerId
from kvrouter.core.requests import EngineChunk, EngineRequest, FinishReason
from kvrouter.text.model import FIRST_WORD_ID
from kvrouter.transports.records.file import FileDiscovery

WORKERS = 2
WAITS_LOOKS = 3
"""A process that sleeps in so many looks one after the other waits for its peers."""

LOOK_EACH_S = 0.0005
STEP_WITHIN_S = 120.0
"""Long: under callgrind on a busy machine a first request takes seconds."""

_END = b"0\r\n\r\n"


class SteppedStream:
    """One answer, whose tokens come when they are brought."""

    def __init__(self) -> None:
        self._chunks: asyncio.Queue[EngineChunk] = asyncio.Queue()
        self._n_tokens = 0

    def __aiter__(self) -> "SteppedStream":
        return self

    async def __anext__(self) -> EngineChunk:
        return await self._chunks.get()

    def cancel(self, reason: str) -> None:
        """The leg ends; its reader hears of it."""
        self._chunks.put_nowait(EngineChunk(finish=FinishReason.CANCELLED, error=reason))

    def bring(self, *, is_last: bool) -> None:
        """The next token is here."""
        self._n_tokens += 1
        token = FIRST_WORD_ID + self._n_tokens % N_WORDS
        self._chunks.put_nowait(EngineChunk((token,), FinishReason.LENGTH if is_last else None))


class SteppedEngine:
    """Takes every leg, and brings nothing by itself."""

    def __init__(self) -> None:
        self.streams: asyncio.Queue[SteppedStream] = asyncio.Queue()

    async def submit(self, request: EngineRequest) -> SteppedStream:  # noqa: ARG002
        """A leg begins."""
        stream = SteppedStream()
        self.streams.put_nowait(stream)
        return stream


class Peer:
    """The workers of the fleet in a folder, and a client over one connection."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, engine: SteppedEngine
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._engine = engine
        self._seed = 0
        self.pid = 0
        """The counted process's."""

    async def ask(self, *, words: int, tokens: int, stream: bool) -> None:
        """Send a new prompt and read its answer. Raises AnswerFailed when it is none."""
        async with asyncio.timeout(STEP_WITHIN_S):
            self._seed += 1
            self._writer.write(chat_request(prompt_of(self._seed, words), max_tokens=tokens, stream=stream))
            leg = await self._engine.streams.get()
            await self.wait_idle()
            read = b""
            for number in range(1, tokens + 1):
                leg.bring(is_last=number == tokens)
                while stream and sum(map(read.count, TEXTS)) < number:
                    read += await self._more()
                if number < tokens:
                    await self.wait_idle()
            while not _is_whole(read, stream=stream):
                read += await self._more()
            if not read.startswith(b"HTTP/1.1 200"):
                raise AnswerFailed(f"{read[:1000]!r}")
            await self.wait_idle()

    async def wait_idle(self) -> None:
        """Return when every thread of the counted process waits, as it does for us."""
        looks = 0
        while looks < WAITS_LOOKS:
            await asyncio.sleep(LOOK_EACH_S)
            looks = looks + 1 if _states(self.pid) == {"S"} else 0

    async def _more(self) -> bytes:
        data = await self._reader.read(65536)
        if not data:
            raise AnswerFailed("the connection ended")
        return data


async def serve_workers(stack: AsyncExitStack, folder: Path, engine: SteppedEngine) -> None:
    """Announce the workers in ``folder``, which say nothing by themselves, until the stack ends."""
    discovery = FileDiscovery(
        folder,
        namespace=NAMESPACE,
        on_trouble=lambda what, why: fail(f"{what}: {why}"),
        on_refused=lambda what, why: fail(f"{what}: {why}"),
        lease_s=PUT_OFF_S,
    )
    stack.push_async_callback(discovery.close)
    for worker in range(WORKERS):
        await discovery.publish(await serve(stack, WorkerId(worker), engine, heartbeat_s=PUT_OFF_S))


def _states(pid: int) -> set[str]:
    """Return the states that a process's threads are in, in the letters of /proc."""
    tasks = Path(f"/proc/{pid}/task")
    return {(task / "stat").read_text().rpartition(")")[2].split()[0] for task in tasks.iterdir()}


def _is_whole(read: bytes, *, stream: bool) -> bool:
    if stream:
        return read.endswith(_END)
    head, found, body = read.partition(b"\r\n\r\n")
    if not found:
        return False
    lengths = [
        line.partition(b":")[2] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")
    ]
    return bool(lengths) and len(body) >= int(lengths[0])

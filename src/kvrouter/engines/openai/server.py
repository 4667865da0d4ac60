"""An HTTP client for an engine's server, and its metrics page.

Clients may read what an error of a call says, so it omits the engine's address; an error of a probe has it.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakSet

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from kvrouter.core.errors import ContextLengthExceeded, InvalidRequest, KvrouterError, ProtocolError
from kvrouter.core.json import Unreadable, parsed
from kvrouter.engines.attach import Attached, AttachSpec, KeyRefused
from kvrouter.transports.requests.port import (
    EngineFailed,
    EngineFailedLater,
    StreamBroken,
    WorkerFull,
    WorkerUnreachable,
)

CONNECT_LIMIT_S = 5.0
"""How long the engine's server may take to accept a connection."""

PROBE_LIMIT_S = 10.0
"""How long a small question, such as for the engine's models or metrics, may take."""

KEEP_IDLE_S = 3.0
"""How long a connection that nobody uses is kept: engines end theirs after five seconds, and a call that is
sent just then would be lost."""

END_LIMIT_S = 1.0
"""How long an answer may take to end behind its last event, so that its connection is used again."""

READ_BYTES = 256 * 1024
"""How much of an answer is held here before the engine is made to wait."""

ANSWER_MAX_BYTES = 64 * 1024 * 1024
"""The longest answer to a question, or to a call that is not streamed."""

SAID_MAX_CHARS = 500
"""What an error quotes of an engine's own words is cut here."""

_FULL = frozenset({429, 503})
"""The statuses with which an engine says that it takes no more for now."""

_AT_FAULT = frozenset({400, 404, 413, 422, 431})
"""The statuses that blame the call."""

_CONTEXT_WORDS = (
    "maximum context length",
    "max_model_len",
    "max_seq_len",
    "should not exceed max_num_tokens",
    "context length",
    "maximum allowed length",
    "too long",
)


class _Said(msgspec.Struct, frozen=True):
    """What engines say of a mistake: OpenAI's form, or the older flat one."""

    message: str = ""
    param: str | None = None


class _Failure(msgspec.Struct, frozen=True):
    error: _Said | str | None = None
    message: str = ""
    detail: object = None
    param: str | None = None


_failure = msgspec.json.Decoder(_Failure)


class EngineServer:
    """One engine's HTTP server at ``url``, with or without the ``api_key`` that it asks for."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        connect_limit_s: float = CONNECT_LIMIT_S,
        look_limit_s: float = PROBE_LIMIT_S,
    ) -> None:
        self.url = url.rstrip("/")
        self._headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._connect_limit_s = connect_limit_s
        self._look_limit_s = look_limit_s
        self._session: aiohttp.ClientSession | None = None
        self._answers: WeakSet[aiohttp.ClientResponse] = WeakSet()

    async def open(self) -> None:
        """Be ready to ask; nothing is sent yet."""
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=30, keepalive_timeout=KEEP_IDLE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_limit_s),
            read_bufsize=READ_BYTES,
            auto_decompress=True,
        )

    async def close(self) -> None:
        """Close every connection; open answers break. Idempotent."""
        if self._session is not None:
            for answer in tuple(self._answers):
                answer.close()  # a session alone leaves the readers waiting
            await self._session.close()
            self._session = None

    async def look(self, path: str) -> bytes | None:
        """Ask a small question; None when the engine does not know the path.

        Raises WorkerUnreachable when it does not answer, or with an error, KeyRefused for one about its key.
        """
        limit = aiohttp.ClientTimeout(total=self._look_limit_s, sock_connect=self._connect_limit_s)
        try:
            async with self._opened().get(f"{self.url}{path}", timeout=limit) as answer:
                if answer.status in (404, 405):
                    return None
                body = await _read_whole(answer)
                if answer.status in (401, 403):
                    raise KeyRefused(f"{self.url}{path} answered {answer.status}: {said(body)[0]}")
                if answer.status != 200:
                    raise WorkerUnreachable(f"{self.url}{path} answered {answer.status}: {said(body)[0]}")
                return body
        except StreamBroken as error:
            raise WorkerUnreachable(f"{self.url}{path}: {error.message}") from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise WorkerUnreachable(f"{self.url}{path}: {failed_by(error)}") from error

    async def post(
        self, path: str, body: bytes, headers: Mapping[str, str] | None = None
    ) -> aiohttp.ClientResponse:
        """Send a call; return its answer, whose body is not read yet, once the engine accepted it.

        Raises WorkerUnreachable when the engine cannot be reached or fails, WorkerFull when it takes no more,
        InvalidRequest or ContextLengthExceeded when the call is at fault.
        """
        try:
            answer = await self._opened().post(
                f"{self.url}{path}",
                data=body,
                headers={"content-type": "application/json", **(headers or {})},
            )
            self._answers.add(answer)
            if answer.status == 200:
                return answer
            async with answer:
                raise failure_of(answer.status, await _read_whole(answer))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise WorkerUnreachable(f"the engine is not reached: {failed_by(error)}") from error

    async def ask(self, path: str, body: bytes, headers: Mapping[str, str] | None = None) -> bytes:
        """Send a call; return its whole answer. Raises as :meth:`post` does, StreamBroken once it was
        accepted.
        """
        answer = await self.post(path, body, headers)
        try:
            async with answer:
                return await _read_whole(answer)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise StreamBroken(f"the engine's answer broke off: {failed_by(error)}") from error

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise WorkerUnreachable("the engine was left alone: nothing is sent to it any more")
        return self._session


def let_end(answer: aiohttp.ClientResponse) -> None:
    """Leave an answer that has nothing more to say: its connection is free for others once the engine ends
    it, and is closed when it does not within :data:`END_LIMIT_S`.
    """
    late = asyncio.get_running_loop().call_later(END_LIMIT_S, answer.close)
    answer.content.on_eof(late.cancel)


def failed_by(error: Exception) -> str:
    """Return what failed on the way, without the address: an error's own words have it."""
    name = type(error).__name__
    number = error.errno if isinstance(error, OSError) else None
    return f"{name}: {os.strerror(number)}" if number is not None and number > 0 else name


def failure_of(status: int, body: bytes) -> KvrouterError:
    """Return what an engine's error answer means: the call's fault, a full engine, or a failed one."""
    message, param = said(body)
    if status in _FULL:
        return WorkerFull(f"the engine answered {status}: {message}")
    if status in _AT_FAULT:
        return _refused(status, message, param)
    return EngineFailed(f"the engine answered {status}: {message}")


def failure_inside(code: int | str | None, message: str, param: str | None) -> KvrouterError:
    """Return what an error means that takes the place of an answer: the call's fault, or a failed engine."""
    if isinstance(code, int) and code in _AT_FAULT:
        return _refused(code, message, param)
    return EngineFailedLater(f"the engine failed: {message}")


def said(body: bytes) -> tuple[str, str | None]:
    """Return the message of an error answer, and the field that it is about where the engine names it."""
    try:
        failure = parsed(_failure, body)
    except Unreadable:
        return body.decode("utf-8", "replace").strip()[:SAID_MAX_CHARS], None
    if isinstance(failure.error, _Said):
        return failure.error.message[:SAID_MAX_CHARS], failure.error.param
    message = failure.message or failure.error or ("" if failure.detail is None else str(failure.detail))
    return message[:SAID_MAX_CHARS], failure.param


def _refused(status: int, message: str, param: str | None) -> InvalidRequest:
    if any(words in message for words in _CONTEXT_WORDS):
        return ContextLengthExceeded(message, param=param)
    return InvalidRequest(message or f"the engine answered {status}", param=param)


async def _read_whole(answer: aiohttp.ClientResponse) -> bytes:
    """Read a body up to :data:`ANSWER_MAX_BYTES`. Raises StreamBroken for a longer one."""
    pieces: list[bytes] = []
    size_bytes = 0
    async for piece in answer.content.iter_any():
        pieces.append(piece)
        size_bytes += len(piece)
        if size_bytes > ANSWER_MAX_BYTES:
            raise StreamBroken(f"the answer is over the {ANSWER_MAX_BYTES} bytes allowed")
    return b"".join(pieces)


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of one metric."""

    labels: Mapping[str, str]
    value: float


Samples = Mapping[str, Sequence[Sample]]
"""The samples of each metric that was found, by its name."""


def read_metrics(page: bytes, names: Iterable[str]) -> Samples:
    """Return the samples of ``names`` in a page of Prometheus's text format; raise ProtocolError.

    A page has thousands of lines, and most are histograms that nobody here reads: those are not parsed.
    """
    wanted = tuple(names)
    try:
        lines = [line for line in page.decode().splitlines() if line.startswith(wanted)]
        found: dict[str, list[Sample]] = {}
        for metric in text_string_to_metric_families("\n".join(lines) + "\n"):
            for sample in metric.samples:
                if sample.name in wanted:
                    found.setdefault(sample.name, []).append(Sample(sample.labels, sample.value))
    except (ValueError, KeyError, IndexError) as error:
        raise ProtocolError(f"the engine's metrics page cannot be read: {error}", param="metrics") from error
    return found


async def attach_server(
    spec: AttachSpec, attach: Callable[[EngineServer, AttachSpec], Awaitable[Attached]]
) -> Attached:
    """Open the engine's server, and return what ``attach`` makes of it; its errors close the server again."""
    server = EngineServer(spec.url, api_key=spec.api_key)
    await server.open()
    try:
        return await attach(server, spec)
    except BaseException:
        await server.close()
        raise

"""Completions sent to an OpenAI-compatible server, and the times at which a client sees their answers."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import NamedTuple, TypeVar

import aiohttp
import msgspec

from kvrouter.core.errors import KvrouterError, ProtocolError
from kvrouter.core.http_client import connection_failure
from kvrouter.engines.openai.answer_events import AnswerEvent, AnswerUsage, UnreadEvent, read_event
from kvrouter.engines.openai.failures import failure_inside
from kvrouter.engines.openai.request_times import OwnTimes, read_own_times
from kvrouter.engines.openai.server import EngineServer, let_end
from kvrouter.engines.openai.sse import DONE, EventCutter
from kvrouter.transports.requests.port import StreamBroken

Clock = Callable[[], float]
"""Seconds that never go back."""

COMPLETIONS = "/v1/completions"

Request = TypeVar("Request")


class CompletionFailed(KvrouterError):
    """A completion got no whole answer, or one that does not count its tokens. The message names the URL."""

    code = "completion_failed"


class TimedCompletion(NamedTuple):
    """An answered completion: when it was sent, when its first and last pieces came, and the server's counts
    and times. ``cached_tokens`` and ``own`` are None where the server does not report them.
    """

    sent_s: float
    first_s: float
    last_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None
    own: OwnTimes | None


async def send_completion(
    server: EngineServer, fields: Mapping[str, object], *, limit_s: float, clock: Clock
) -> TimedCompletion:
    """Send a completion with ``fields``, whose answer is streamed and as long as ``max_tokens``. Raises
    CompletionFailed.
    """
    stream = {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    where = f"{server.url}{COMPLETIONS}"
    sent_s = clock()
    try:
        async with asyncio.timeout(limit_s):
            times_s, usage, own = await _read_stream(server, msgspec.json.encode({**fields, **stream}), clock)
    except TimeoutError as error:
        raise CompletionFailed(f"{where}: a request did not end within {limit_s:g} s") from error
    except KvrouterError as error:
        raise CompletionFailed(f"{where}: {error.message}") from error
    if usage is None or not usage.prompt_tokens or not usage.completion_tokens or not times_s:
        raise CompletionFailed(
            f"{where}: the answer has no tokens, or does not count them: stream_options.include_usage is "
            "needed"
        )
    return TimedCompletion(
        sent_s,
        times_s[0],
        times_s[-1],
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.cached_tokens,
        own,
    )


async def closed_loop(
    requests: Iterable[Request], send: Callable[[Request], Awaitable[None]], *, concurrency: int
) -> None:
    """Send requests in their order, ``concurrency`` at a time. Raises the first error of ``send``."""
    waiting = iter(requests)

    async def client() -> None:
        for request in waiting:
            await send(request)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(client())
    except BaseExceptionGroup as failed:
        raise _first_leaf(failed) from failed


def _first_leaf(failed: BaseException) -> BaseException:
    while isinstance(failed, BaseExceptionGroup):
        failed = failed.exceptions[0]
    return failed


async def _read_stream(
    server: EngineServer, body: bytes, clock: Clock
) -> tuple[list[float], AnswerUsage | None, OwnTimes | None]:
    """Send a completion and read its events to the end. Raises as :meth:`EngineServer.post` does,
    StreamBroken for a connection that ends early, and ProtocolError for a stream without its last event.
    """
    answer = await server.post(COMPLETIONS, body)
    times_s: list[float] = []
    usage: AnswerUsage | None = None
    own: OwnTimes | None = None
    cutter = EventCutter()
    try:
        while piece := await answer.content.readany():
            now_s = clock()
            for data, event in _events(cutter, piece):
                if event is None:
                    let_end(answer)
                    return times_s, usage, own
                if event.choices:
                    times_s.append(now_s)
                if event.usage is not None:
                    usage, own = event.usage, read_own_times(data)
    except TimeoutError:
        answer.close()
        raise
    except (aiohttp.ClientError, OSError) as error:
        raise StreamBroken(f"the answer broke off: {connection_failure(error)}") from error
    except BaseException:
        answer.close()  # the engine stops to work for a client that has left
        raise
    raise ProtocolError("the answer broke off before its last event", param="data")


def _events(cutter: EventCutter, piece: bytes) -> Iterator[tuple[bytes, AnswerEvent | None]]:
    """Yield the events that ``piece`` completes, and None for the event that ends the stream."""
    for _, data in cutter.push(piece):
        if data == DONE:
            yield data, None
        elif data:
            event = read_event(data)
            if isinstance(event, UnreadEvent):
                raise ProtocolError(event.why, param="data")
            if event.error is not None:
                raise failure_inside(event.error)
            yield data, event

"""Completions sent to an OpenAI-compatible server, and the times at which a client sees their answers."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import NamedTuple, TypeVar

import msgspec

from kvrouter.core.errors import KvrouterError
from kvrouter.engines.openai.answer_events import AnswerEvent, AnswerUsage, read_event
from kvrouter.engines.openai.request_times import OwnTimes, read_own_times
from kvrouter.engines.openai.server import EngineServer
from kvrouter.engines.openai.sse import AnswerReading
from kvrouter.engines.openai.streams import SseStream

Clock = Callable[[], float]
"""Seconds that never go back."""

COMPLETIONS = "/v1/completions"
ANSWER = AnswerReading(passes_raw=False)

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
    where = f"{server.url}{COMPLETIONS}"
    body = {**fields, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    seen = _Seen(clock, clock())
    stream = SseStream(server.post(COMPLETIONS, msgspec.json.encode(body)), ANSWER, seen.read)
    try:
        async with asyncio.timeout(limit_s):
            async for _ in stream:
                pass
    except TimeoutError as error:
        raise CompletionFailed(f"{where}: a request did not end within {limit_s:g} s") from error
    except KvrouterError as error:
        raise CompletionFailed(f"{where}: {error.message}") from error
    finally:
        stream.cancel("the client left")
    return seen.completion(where)


class _Seen:
    """What a client saw of the answer to a completion that it sent at ``sent_s``."""

    def __init__(self, clock: Clock, sent_s: float) -> None:
        self._clock = clock
        self._sent_s = sent_s
        self._times_s: list[float] = []
        self._usage = AnswerUsage()
        self._own: OwnTimes | None = None

    def read(self, data: bytes) -> AnswerEvent:
        """Read an event that has just come."""
        event = read_event(data)
        if event.choices:
            self._times_s.append(self._clock())
        if event.usage is not None:
            self._usage, self._own = event.usage, read_own_times(data)
        return event

    def completion(self, where: str) -> TimedCompletion:
        """Return the whole answer. Raises CompletionFailed where its tokens were not counted."""
        usage, times_s = self._usage, self._times_s
        if not usage.prompt_tokens or not usage.completion_tokens or not times_s:
            raise CompletionFailed(
                f"{where}: the answer has no tokens, or does not count them: stream_options.include_usage is "
                "needed"
            )
        return TimedCompletion(
            self._sent_s,
            times_s[0],
            times_s[-1],
            usage.prompt_tokens,
            usage.completion_tokens,
            usage.cached_tokens,
            self._own,
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

"""A streamed answer of an OpenAI-compatible server, with the time at which each piece of it came."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import aiohttp

from kvrouter.core.errors import ProtocolError
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


class TimedStream(NamedTuple):
    """The times of the events with a piece of the answer, and the counts and times in the last event."""

    times_s: Sequence[float]
    usage: AnswerUsage | None
    own: OwnTimes | None


async def read_timed_stream(server: EngineServer, body: bytes, clock: Clock) -> TimedStream:
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
                    return TimedStream(times_s, usage, own)
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

"""One call's answer on the wire, whoever writes it: its status, its headers, and its failure."""

import asyncio
import time

from kvrouter.core.errors import KvrouterError
from kvrouter.core.ids import ModelName, RequestId
from kvrouter.frontend.errors import JSON_HEADERS, error_body, error_event, error_headers
from kvrouter.frontend.http import SSE_FILLER, Disconnect, Responder, Stream
from kvrouter.frontend.http.response import ResponseHeaders
from kvrouter.frontend.openai.answers import Answer, Kind, answer_id
from kvrouter.frontend.openai.parse import Call
from kvrouter.frontend.placed import placed_headers
from kvrouter.service.generation import Generation

EVENT_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class Exchange:
    """One call's answer on the wire."""

    __slots__ = ("_responder", "_stream", "kind", "model", "request_id", "status")

    def __init__(self, kind: Kind, responder: Responder, request_id: RequestId) -> None:
        self.kind = kind
        self.model: ModelName | None = None
        self.request_id = request_id
        self.status = KvrouterError.status_hint
        """The status that the call ended with: a mistake of ours until it is answered."""
        self._responder = responder
        self._stream: Stream | None = None

    async def send(self, generation: Generation, body: bytes) -> None:
        """Answer with one JSON object."""
        self.status = 200
        await self._responder.send(200, self._headers(JSON_HEADERS, generation), body)

    async def send_query(self, call: Call, body: bytes) -> None:
        """Answer a call that only asked where it would go, with all of its answer."""
        self.status = 200
        fixed = EVENT_HEADERS if call.stream else JSON_HEADERS
        await self._responder.send(200, (*fixed, (b"x-request-id", self.request_id.encode())), body)

    async def begin_stream(self, generation: Generation) -> Stream:
        """Begin to answer with server-sent events.

        Not before the first of them is here, so that what fails until then has a status.
        """
        self._stream = await self._responder.start_stream(
            200, self._headers(EVENT_HEADERS, generation), filler=SSE_FILLER
        )
        return self._stream

    def end_stream(self, stream: Stream) -> None:
        """The stream is whole."""
        stream.end()
        self.status = 200

    def fail(self, error: KvrouterError) -> None:
        """Answer with an error: as a status, or as the last event of a stream that has begun."""
        self.status = error.status_hint
        if self._stream is not None:
            self._stream.write(error_event(error))
            self._stream.end()
            return
        headers = (*error_headers(error), (b"x-request-id", self.request_id.encode()))
        self._responder.answer(error.status_hint, headers, error_body(error))

    def answer_of(self, call: Call) -> Answer:
        """Return what writes an answer to ``call`` in OpenAI's form."""
        return Answer(
            self.kind,
            answer_id=answer_id(self.kind, self.request_id),
            model=call.model,
            created_s=int(time.time()),
            usage_null=call.stream and call.stream_options.include_usage,
        )

    def _headers(self, fixed: ResponseHeaders, generation: Generation) -> ResponseHeaders:
        return (*fixed, (b"x-request-id", self.request_id.encode()), *placed_headers(generation))


def cancel_with(responder: Responder) -> None:
    """Cancel the running task when its client leaves: nobody else tells it while it waits for an engine."""
    task = asyncio.current_task()

    def leave(_: Disconnect) -> None:
        if task is not None:
            task.cancel()

    responder.on_disconnect(leave)

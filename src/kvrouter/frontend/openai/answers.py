"""OpenAI responses, as JSON and as server-sent events.

The events of a stream differ in one string only; the rest is encoded once per request.
"""

from collections.abc import Mapping
from enum import Enum

import msgspec

from kvrouter.core.requests import FinishReason, Usage
from kvrouter.frontend.http import sse_event

_encode = msgspec.json.encode


class RouteKind(Enum):
    """Chat or completion, with the prefix of its ids, and the ``object`` of complete and streamed answers."""

    CHAT = ("chatcmpl", "chat.completion", "chat.completion.chunk")
    COMPLETION = ("cmpl", "text_completion", "text_completion")

    def __init__(self, id_prefix: str, complete: str, streamed: str) -> None:
        self.id_prefix = id_prefix
        self.complete = complete
        self.streamed = streamed


def answer_id(kind: RouteKind, request_id: str) -> str:
    """Return the ``id`` of an answer."""
    return f"{kind.id_prefix}-{request_id}"


def usage_json(usage: Usage) -> dict[str, object]:
    """Return OpenAI's usage object."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


class AnswerFormat:
    """Encodes the answer to one call, complete or streamed. ``created_s`` is in seconds since 1970.

    An event of a stream is ``_open``, the delta's fields, ``_close``, the finish reason, ``_end``.
    """

    __slots__ = ("_chat", "_close", "_end", "_id", "_kind", "_open", "_text_head", "_text_tail")

    def __init__(
        self, kind: RouteKind, *, answer_id: str, model: str, created_s: int, usage_null: bool = False
    ) -> None:
        self._kind = kind
        self._chat = kind is RouteKind.CHAT
        self._id = {"id": answer_id, "created": created_s, "model": model}
        fixed = _encode({**self._id, "object": kind.streamed})[:-1]
        self._open = b"data: " + fixed + b',"choices":[{"index":0,' + (b'"delta":{' if self._chat else b"")
        self._close = (b"}" if self._chat else b"") + b',"logprobs":null,"finish_reason":'
        self._end = b'}],"usage":null}\n\n' if usage_null else b"}]}\n\n"
        self._text_head = self._open + (b'"content":' if self._chat else b'"text":')
        self._text_tail = self._close + b"null" + self._end

    def first_event(self) -> bytes:
        """Return a chat's first event, with the role; empty for completions."""
        if not self._chat:
            return b""
        return self._open + b'"role":"assistant","content":""' + self._text_tail

    def text_event(self, text: str) -> bytes:
        """Return an event with new text: the hot path, one encode and one join."""
        return b"".join((self._text_head, _encode(text), self._text_tail))

    def text_event_with_usage(self, text: str, usage: Usage) -> bytes:
        """Return an event with new text and the usage so far."""
        event = self._text_head + _encode(text) + self._close + b"null}],"
        return event + _encode({"usage": usage_json(usage)})[1:] + b"\n\n"

    def last_event(self, finish: FinishReason, *, nvext: Mapping[str, object] | None = None) -> bytes:
        """Return the event with the finish reason."""
        head = self._open if self._chat else self._text_head + b'""'
        event = head + self._close + _encode(finish)
        if nvext:
            return event + b"}]," + _encode({"nvext": nvext})[1:] + b"\n\n"
        return event + self._end

    def usage_event(self, usage: Usage) -> bytes:
        """Return the final event with the usage and no choices."""
        body = {**self._id, "object": self._kind.streamed, "choices": [], "usage": usage_json(usage)}
        return sse_event(_encode(body))

    def json_body(
        self, text: str, finish: FinishReason, usage: Usage, *, nvext: Mapping[str, object] | None
    ) -> bytes:
        """Return the complete answer as JSON."""
        choice: dict[str, object] = {"index": 0, "finish_reason": finish, "logprobs": None}
        if self._chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        body: dict[str, object] = {**self._id, "object": self._kind.complete, "choices": [choice]}
        body["usage"] = usage_json(usage)
        if nvext:
            body["nvext"] = nvext
        return _encode(body)

"""The meaning of an engine's error answer: the table of statuses, and the errors made from it.

An answer that blames the call passes to the client as it is, and no other engine is asked. After one that
blames the engine the call is sent to another, within the limits of retries; when no engine answers, the last
error passes.
"""

import asyncio
from contextlib import suppress
from enum import Enum, auto

import aiohttp
import msgspec

from kvrouter.core.engine_answer import BODY_MAX_BYTES, EngineAnswer, passed_headers
from kvrouter.core.errors import ContextLengthExceeded, InvalidRequest, KvrouterError
from kvrouter.core.json import Unreadable, parsed
from kvrouter.engines.openai.answer_events import Failure
from kvrouter.transports.requests.port import EngineFailed, EngineFailedLater, WorkerDeclined, WorkerFull

ERROR_CHARS_MAX = 500
"""The limit for an engine's message quoted in an error."""


ERROR_LIMIT_S = 10.0
"""How long the body of an error answer may take to come."""

REDIRECTS = range(300, 400)
REDIRECTED = "it redirects, and no redirect is followed: give the URL at which the engine itself answers"


class Blame(Enum):
    """The party that an error answer blames."""

    CALL = auto()
    """Every engine would refuse it: the answer passes at once. No circuit counts it."""
    FULL = auto()
    """The engine takes no more for now: another may. No circuit counts it."""
    DECLINED = auto()
    """This engine, or a proxy before it, does not take this call; another may. No circuit counts it: a client
    could open circuits with it."""
    ENGINE = auto()
    """The engine failed: another may not. Circuits count it."""


STATUSES: dict[int, Blame] = {
    401: Blame.ENGINE,    # it refuses the router's key: no client's key ever gets there
    403: Blame.DECLINED,  # a key without the right to this, or a filter of content before the engine
    408: Blame.DECLINED,  # it did not read the call in time: HTTP lets clients send it again
    421: Blame.DECLINED,  # the wrong server for it, says HTTP: another connection may be right
    425: Blame.DECLINED,  # too early for it, says HTTP: it may be sent again
    429: Blame.FULL,
    499: Blame.DECLINED,  # it took the client to have left, as when it aborts what runs
    501: Blame.CALL,      # what the model or this release of the engine cannot do
    503: Blame.FULL,
    505: Blame.CALL,
}  # fmt: skip
"""The blame of each status; :func:`blame_of` has the rule for the others."""


def blame_of(status: int) -> Blame:
    """Return the blame of a status: as in the table, else the call for 2xx and 4xx. Any redirect blames the
    engine: its address is wrong, or a login page is before it.
    """
    is_of_call = 200 <= status < 500 and status not in REDIRECTS
    return STATUSES.get(status, Blame.CALL if is_of_call else Blame.ENGINE)


async def read_failure(answer: aiohttp.ClientResponse) -> KvrouterError:
    """Read an answer that is not 200, up to the limit of its body; return the error for it."""
    return failure_of(answer.status, await read_error(answer), tuple(answer.raw_headers))


async def read_error(answer: aiohttp.ClientResponse) -> bytes:
    """Read the body of an error answer, hardly beyond the limit. A body that breaks off, or does not come in
    time, ends there: the status decides.
    """
    body = b""
    with suppress(TimeoutError, aiohttp.ClientError, OSError):
        async with asyncio.timeout(ERROR_LIMIT_S):
            async for piece in answer.content.iter_any():
                body += piece
                if len(body) > BODY_MAX_BYTES:
                    break
    return body


def failure_of(status: int, body: bytes, headers: tuple[tuple[bytes, bytes], ...] = ()) -> KvrouterError:
    """Return the error for an engine's error answer. A body over the limit is replaced by an error in
    OpenAI's form, which quotes its beginning and states that. A redirect is never followed and does not pass:
    it names the engine's own addresses.
    """
    message, param = error_message(body[:BODY_MAX_BYTES])
    blame = blame_of(status)
    answer = None
    if 200 <= status < 300 or 400 <= status < 600:
        passed = passed_headers(headers, of_error=True)
        if len(body) > BODY_MAX_BYTES:
            body, passed = _cut(status, message), _as_json(passed)
        answer = EngineAnswer(status, passed, body)
    if blame is Blame.CALL:
        return _refused(status, message, param, answer)
    text = f"the engine answered {status}: {REDIRECTED if status in REDIRECTS else message}"
    if blame is Blame.FULL:
        return WorkerFull(text, answer=answer)
    if blame is Blame.DECLINED:
        return WorkerDeclined(text, answer=answer)
    return EngineFailed(text, answer=answer)


def failure_inside(error: Failure, answer: EngineAnswer | None = None) -> KvrouterError:
    """Return the error for a failure in place of an answer: the call's fault, or a failed engine."""
    code = error.code
    if isinstance(code, int) and 400 <= code < 600 and blame_of(code) is Blame.CALL:
        return _refused(code, error.message[:ERROR_CHARS_MAX], _short(error.param), answer)
    return EngineFailedLater(f"the engine failed: {error.message[:ERROR_CHARS_MAX]}", answer=answer)


class _ErrorFields(msgspec.Struct, frozen=True):
    """The fields of an engine's error: OpenAI's form, or the older flat one."""

    message: str = ""
    param: str | None = None


class _Failure(msgspec.Struct, frozen=True):
    error: _ErrorFields | str | None = None
    message: str = ""
    detail: object = None
    param: str | None = None


_failure = msgspec.json.Decoder(_Failure)


def error_message(body: bytes) -> tuple[str, str | None]:
    """Return the message of an error answer, and the field that it is about where the engine names it."""
    try:
        failure = parsed(_failure, body)
    except Unreadable:
        return body.decode("utf-8", "replace").strip()[:ERROR_CHARS_MAX], None
    if isinstance(failure.error, _ErrorFields):
        return failure.error.message[:ERROR_CHARS_MAX], _short(failure.error.param)
    message = failure.message or failure.error or ("" if failure.detail is None else str(failure.detail))
    return message[:ERROR_CHARS_MAX], _short(failure.param)


def _short(param: str | None) -> str | None:
    return None if param is None else param[:ERROR_CHARS_MAX]


_CONTEXT_PHRASES = (
    "maximum context length",
    "max_model_len",
    "max_seq_len",
    "should not exceed max_num_tokens",
    "context length",
    "maximum allowed length",
    "too long",
)


def _refused(status: int, message: str, param: str | None, answer: EngineAnswer | None) -> InvalidRequest:
    if any(phrase in message for phrase in _CONTEXT_PHRASES):
        return ContextLengthExceeded(message, param=param, answer=answer)
    return InvalidRequest(message or f"the engine answered {status}", param=param, answer=answer)


def _cut(status: int, message: str) -> bytes:
    text = f"{message} ... (the engine's answer is over {BODY_MAX_BYTES} bytes: kvrouter cut it)"
    kind = "invalid_request_error" if status < 500 else "server_error"
    return msgspec.json.encode({"error": {"message": text, "type": kind, "param": None, "code": status}})


def _as_json(headers: tuple[tuple[bytes, bytes], ...]) -> tuple[tuple[bytes, bytes], ...]:
    others = [(name, value) for name, value in headers if name != b"content-type"]
    return ((b"content-type", b"application/json"), *others)

"""The replay's client: the real ``openai`` package, one request after the other in each conversation.

Conversations run next to each other (open loop between them); inside one, a turn is sent when it is due, and
not before the answer to the turn before it is complete (closed loop).
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from openai import AsyncOpenAI, OpenAIError

from benchmarks.http_replay.schedule import PlannedRequest

PREFILL_WORKER_HEADER = "x-kvrouter-prefill-worker"
DECODE_WORKER_HEADER = "x-kvrouter-decode-worker"


@dataclass(slots=True)
class Answer:
    """What the client saw of one request. Times are in real seconds, by the client's clock.

    ``late_s`` is how long after it could have been sent it was: the client's own delay.
    ``itl_s`` is the time between tokens, averaged over the answer; None below two tokens.
    """

    conversation: int
    turn: int
    late_s: float
    ttft_s: float | None = None
    itl_s: float | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    prefill_worker: str | None = None
    decode_worker: str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where requests go, and how much faster than its own time the fleet runs."""

    base_url: str
    model: str
    speedup: float
    request_timeout_s: float = 120.0


@dataclass(slots=True)
class _Reading:
    """What has been read of one stream so far."""

    first_s: float | None = None
    last_s: float | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


async def replay(
    target: Target,
    conversations: Iterable[Sequence[PlannedRequest]],
    *,
    on_answer: Callable[[Answer], None] = lambda _: None,
) -> list[Answer]:
    """Send every request and return one answer each, in order of conversation and turn.

    A request that fails is an answer with ``error``; its conversation goes on with the next turn.
    """
    async with AsyncOpenAI(
        base_url=f"{target.base_url}/v1",
        api_key="none",
        max_retries=0,
        timeout=target.request_timeout_s,
    ) as client:
        start_s = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(_converse(client, target, turns, start_s=start_s, on_answer=on_answer))
                for turns in conversations
            ]
    return [answer for task in tasks for answer in task.result()]


async def _converse(
    client: AsyncOpenAI,
    target: Target,
    turns: Sequence[PlannedRequest],
    *,
    start_s: float,
    on_answer: Callable[[Answer], None],
) -> list[Answer]:
    answers: list[Answer] = []
    free_s = start_s
    for request in turns:
        may_send_s = max(free_s, start_s + request.due_s / target.speedup)
        await asyncio.sleep(max(0.0, may_send_s - time.perf_counter()))
        answer = await _ask(client, target, request, may_send_s=may_send_s)
        free_s = time.perf_counter()
        answers.append(answer)
        on_answer(answer)
    return answers


async def _ask(client: AsyncOpenAI, target: Target, request: PlannedRequest, *, may_send_s: float) -> Answer:
    sent_s = time.perf_counter()
    answer = Answer(conversation=request.conversation, turn=request.turn, late_s=sent_s - may_send_s)
    try:
        async with asyncio.timeout(target.request_timeout_s):
            reading = await _read(client, target, request)
    except (OpenAIError, TimeoutError) as error:
        answer.error = f"{type(error).__name__}: {error}"
        return answer
    answer.prompt_tokens = reading.prompt_tokens
    answer.output_tokens = reading.output_tokens
    answer.prefill_worker = reading.headers.get(PREFILL_WORKER_HEADER)
    answer.decode_worker = reading.headers.get(DECODE_WORKER_HEADER)
    answer.error = _what_is_wrong(reading, request)
    if reading.cached_tokens is not None:
        answer.cached_tokens = reading.cached_tokens
    if reading.first_s is not None and reading.last_s is not None:
        answer.ttft_s = reading.first_s - sent_s
        if reading.output_tokens > 1:
            answer.itl_s = (reading.last_s - reading.first_s) / (reading.output_tokens - 1)
    return answer


async def _read(client: AsyncOpenAI, target: Target, request: PlannedRequest) -> _Reading:
    stream = await client.chat.completions.create(
        model=target.model,
        messages=[{"role": "user", "content": request.prompt}],
        max_tokens=request.output_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    reading = _Reading(headers=stream.response.headers)
    async for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            reading.last_s = time.perf_counter()
            if reading.first_s is None:
                reading.first_s = reading.last_s
        if chunk.usage is not None:
            reading.prompt_tokens = chunk.usage.prompt_tokens
            reading.output_tokens = chunk.usage.completion_tokens
            details = chunk.usage.prompt_tokens_details
            reading.cached_tokens = None if details is None else details.cached_tokens
    return reading


def _what_is_wrong(reading: _Reading, request: PlannedRequest) -> str | None:
    if reading.first_s is None:
        return "the answer has no text"
    if reading.output_tokens != request.output_tokens:
        return f"{reading.output_tokens} tokens came, {request.output_tokens} were asked for"
    if reading.cached_tokens is None:
        return "the usage does not say how many prompt tokens were cached"
    if PREFILL_WORKER_HEADER not in reading.headers or DECODE_WORKER_HEADER not in reading.headers:
        return "the headers do not name the workers"
    return None

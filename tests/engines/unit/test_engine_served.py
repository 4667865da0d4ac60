"""An engine behind its own server, as the worker next to it has it: the answers to its legs."""

import asyncio
import json

import pytest
from msgspec.structs import replace

from kvrouter.core.errors import InvalidRequest
from kvrouter.core.requests import Bootstrap, EngineChunk, EngineRequest, FinishReason, KvLoss, Leg
from kvrouter.transports.requests.port import StreamBroken, WorkerFull, WorkerUnreachable
from tests.testing.engine_requests import client_call, engine_request, short_completion
from tests.testing.probed_engine import probed_engine
from tests.testing.scripted_engine import (
    EMPTY_CHAT,
    JSON,
    AnswerEnd,
    ScriptedAnswer,
    event_of,
    page,
    scripted_engine,
)


async def test_streamed_leg_gives_tokens_and_passes_no_prompt_token_ids() -> None:
    async with scripted_engine() as scripted, probed_engine(scripted) as watched:
        scripted.answers.append(ScriptedAnswer((page("vllm-0.32.0-completion-tokens.sse"),)))
        chunks = [chunk async for chunk in await watched.engine.submit(short_completion())]
        assert [token for chunk in chunks for token in chunk.token_ids] == [1629, 1581, 1629]
        assert chunks[-1].finish is FinishReason.LENGTH
        assert b'"prompt_token_ids":[' not in b"".join(chunk.raw for chunk in chunks)
        call = await scripted.called()
        assert (call.path, call.body["return_token_ids"]) == ("/v1/completions", True)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (ScriptedAnswer.error(404, "vllm-0.32.0-error-model.json"), InvalidRequest),
        (ScriptedAnswer((b"",), status=503), WorkerFull),
        (ScriptedAnswer(ends=AnswerEnd.REFUSED), StreamBroken),
    ],
)
async def test_refusal_of_a_streamed_leg_is_raised_at_its_read(
    answer: ScriptedAnswer, kind: type[Exception]
) -> None:
    async with scripted_engine() as scripted, probed_engine(scripted) as watched:
        scripted.answers.append(answer)
        stream = await watched.engine.submit(short_completion())
        with pytest.raises(kind):
            await anext(aiter(stream))
        with pytest.raises(StopAsyncIteration):
            await anext(aiter(stream))


async def test_streamed_leg_is_accepted_before_the_response_headers() -> None:
    async with scripted_engine() as scripted, probed_engine(scripted) as watched:
        scripted.answers.append(ScriptedAnswer(ends=AnswerEnd.NO_HEADERS))
        await watched.engine.submit(short_completion())
        await scripted.called()


@pytest.mark.parametrize("request_", [short_completion(stream=False), short_completion(kind=Leg.PREFILL)])
async def test_unstreamed_leg_is_accepted_at_once_and_refused_at_its_read(
    request_: EngineRequest,
) -> None:
    async with scripted_engine() as scripted, probed_engine(scripted) as watched:
        whole = ScriptedAnswer((page("vllm-0.32.0-completion.json"),), content_type=JSON)
        scripted.answers.extend([ScriptedAnswer.error(404, "vllm-0.32.0-error-model.json"), whole])
        refused = await watched.engine.submit(request_)
        with pytest.raises(InvalidRequest, match="does not exist"):
            await anext(aiter(refused))
        chunks = [chunk async for chunk in await watched.engine.submit(request_)]
        assert [chunk.finish for chunk in chunks] == [FinishReason.LENGTH]


async def test_refused_prefill_with_tools_is_retried_with_tool_choice_none() -> None:
    """vLLM without --enable-auto-tool-choice refuses tools that may be called."""
    call = client_call({"messages": [], "tools": [{"type": "function", "function": {"name": "f"}}]})
    async with scripted_engine() as scripted, probed_engine(scripted) as watched:
        refusal = ScriptedAnswer.error(400, "vllm-0.32.0-error-field.json")
        scripted.answers.extend(
            [refusal, ScriptedAnswer((page("vllm-0.32.0-completion.json"),), content_type=JSON)]
        )
        chunks = [
            chunk async for chunk in await watched.engine.submit(engine_request(kind=Leg.PREFILL, call=call))
        ]
        assert [chunk.finish for chunk in chunks] == [FinishReason.LENGTH]
        assert [asked.body.get("tool_choice") for asked in scripted.calls] == [None, "none"]
        scripted.answers.extend([refusal, refusal])
        stream = await watched.engine.submit(engine_request(kind=Leg.PREFILL, call=call))
        with pytest.raises(InvalidRequest):
            await anext(aiter(stream))
        assert len(scripted.calls) == 4


TOOLS = [{"type": "function", "function": {"name": "f", "description": "about it " * 9}}]
PREFILLED = {"remote_host": "there", "remote_block_ids": [1]}


def prefilled(prompt_tokens: int) -> ScriptedAnswer:
    said = {"choices": [{"finish_reason": "length"}], "kv_transfer_params": PREFILLED}
    body = {**said, "usage": {"prompt_tokens": prompt_tokens}}
    return ScriptedAnswer((json.dumps(body).encode(),), content_type=JSON)


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "f"}}, "auto", None]
)
async def test_prefill_of_a_shorter_prompt_without_tools_is_not_used(
    choice: object,
) -> None:
    """As vLLM with --exclude-tools-when-tool-choice-none: its prompt has fewer tokens than the call has."""
    call = client_call({"messages": [], "tools": TOOLS, "tool_choice": choice})
    request = engine_request(tuple(range(90)), kind=Leg.PREFILL, call=call)
    refusal = ScriptedAnswer.error(400, "vllm-0.32.0-error-field.json")
    first_asked = [choice] if choice in ("auto", None) else []
    async with scripted_engine() as scripted, probed_engine(scripted) as watched:

        async def prefill(*answers: ScriptedAnswer) -> object:
            scripted.answers.extend(answers)
            scripted.calls.clear()
            (chunk,) = [chunk async for chunk in await watched.engine.submit(request)]
            return chunk.kv_transfer_params

        def choices() -> list[object]:
            return [asked.body.get("tool_choice") for asked in scripted.calls]

        refusals = [refusal] * len(first_asked)
        assert await prefill(*refusals, prefilled(90)) == PREFILLED
        assert choices() == [*first_asked, "none"]
        assert await prefill(*refusals, prefilled(12)) == {}
        assert choices() == [*first_asked, "none"]
        kept = first_asked or ["auto"]
        assert await prefill(prefilled(90)) == PREFILLED
        assert choices() == kept
        with pytest.raises(InvalidRequest):
            await prefill(refusal)
        assert choices() == kept


async def test_cancelled_leg_closes_its_connection_to_the_engine() -> None:
    async with scripted_engine() as scripted, probed_engine(scripted) as watched:
        scripted.answers.extend(
            [ScriptedAnswer(ends=AnswerEnd.HELD), ScriptedAnswer(ends=AnswerEnd.NO_HEADERS)]
        )
        for i, request in enumerate((short_completion(), short_completion(stream=False))):
            stream = await watched.engine.submit(request)
            call = await scripted.called(i + 1)
            stream.cancel("the client left")
            await call.left.wait()


async def test_leg_cancelled_while_awaiting_headers_closes_its_connection() -> None:
    async with scripted_engine() as scripted, probed_engine(scripted) as watched:
        scripted.answers.append(ScriptedAnswer(ends=AnswerEnd.NO_HEADERS))
        stream = await watched.engine.submit(short_completion())
        reading = asyncio.ensure_future(anext(aiter(stream)))
        call = await scripted.called()
        stream.cancel("the client left")
        await call.left.wait()
        assert await reading == EngineChunk(finish=FinishReason.CANCELLED, error="the client left")


def fetching(*, stream: bool = True, bootstrap: bool = False) -> EngineRequest:
    """A decode leg that comes for its KV."""
    if bootstrap:
        return replace(short_completion(stream=stream, kind=Leg.DECODE), bootstrap=Bootstrap("h", 1, 2))
    return replace(short_completion(stream=stream, kind=Leg.DECODE), kv_transfer_params={"remote_port": 1})


DIED = {"error": {"message": "no KV came", "code": 500}}
TOKEN = {"choices": [{"index": 0, "text": "x", "token_ids": [1], "finish_reason": None}]}

DOWN = ScriptedAnswer((b'{"error":{"message":"no KV came"}}',), status=500)


@pytest.mark.parametrize(
    ("request_", "answer"),
    [
        (fetching(), DOWN),
        (fetching(bootstrap=True), DOWN),
        (fetching(), ScriptedAnswer((event_of(DIED),))),
        (fetching(stream=False), DOWN),
        (fetching(stream=False), ScriptedAnswer((event_of(DIED)[6:],), content_type=JSON)),
    ],
)
async def test_decode_leg_failing_before_its_first_token_reports_kv_lost(
    request_: EngineRequest, answer: ScriptedAnswer
) -> None:
    async with scripted_engine() as scripted, probed_engine(scripted) as watched:
        scripted.answers.append(answer)
        (chunk,) = [chunk async for chunk in await watched.engine.submit(request_)]
    assert (chunk.finish, chunk.kv_lost) == (FinishReason.ERROR, KvLoss.BROKEN)
    assert "no KV came" in str(chunk.error)


@pytest.mark.parametrize(
    ("request_", "answer", "kind"),
    [
        (fetching(), ScriptedAnswer((event_of(TOKEN), event_of(DIED))), StreamBroken),
        (fetching(), ScriptedAnswer((event_of(TOKEN),), ends=AnswerEnd.CUT), StreamBroken),
        (fetching(), ScriptedAnswer(ends=AnswerEnd.CUT), StreamBroken),
        (fetching(), ScriptedAnswer(ends=AnswerEnd.REFUSED), StreamBroken),
        (fetching(stream=False), ScriptedAnswer(ends=AnswerEnd.REFUSED), StreamBroken),
        (fetching(), ScriptedAnswer((b"",), status=503), WorkerFull),
        (fetching(), ScriptedAnswer.error(404, "vllm-0.32.0-error-model.json"), InvalidRequest),
        (short_completion(), DOWN, WorkerUnreachable),
        (short_completion(kind=Leg.DECODE), DOWN, WorkerUnreachable),
        (short_completion(), ScriptedAnswer((event_of(DIED),)), StreamBroken),
        (short_completion(), ScriptedAnswer(EMPTY_CHAT), StreamBroken),
        (short_completion(), ScriptedAnswer(EMPTY_CHAT[1:]), StreamBroken),
        (short_completion(kind=Leg.PREFILL), DOWN, WorkerUnreachable),
    ],
)
async def test_other_decode_leg_failures_do_not_report_kv_lost(
    request_: EngineRequest, answer: ScriptedAnswer, kind: type[Exception]
) -> None:
    async with scripted_engine() as scripted, probed_engine(scripted) as watched:
        scripted.answers.append(answer)
        with pytest.raises(kind):
            assert all([chunk.kv_lost is None async for chunk in await watched.engine.submit(request_)])


@pytest.mark.parametrize("resumable", [True, False])
@pytest.mark.parametrize("usage", [{}, {"stream_options": {"include_usage": True}}])
@pytest.mark.parametrize(
    ("body", "answer"),
    [
        ({"messages": []}, EMPTY_CHAT),
        ({"messages": [], "tools": TOOLS}, EMPTY_CHAT),
        ({"prompt": [1, 2]}, EMPTY_CHAT[1:]),
    ],
)
async def test_decode_leg_without_a_token_and_a_finish_reason_has_lost_its_kv(
    body: dict[str, object], answer: tuple[bytes, ...], usage: dict[str, object], resumable: bool
) -> None:
    """vLLM writes a chat's role with its first output, and no event of a completion without a token."""
    call = client_call({"model": "m", **body, **usage, "stream": True}, resumable=resumable)
    request = engine_request((1, 2), Leg.DECODE, call=call, kv_transfer_params={"remote_port": 1})
    async with scripted_engine() as scripted, probed_engine(scripted) as watched:
        scripted.answers.append(ScriptedAnswer(answer))
        (chunk,) = [chunk async for chunk in await watched.engine.submit(request)]
    assert (chunk.finish, chunk.kv_lost, chunk.raw) == (FinishReason.ERROR, KvLoss.BROKEN, b"")


async def test_decode_leg_with_its_kv_streams_and_can_be_cancelled() -> None:
    async with scripted_engine() as scripted, probed_engine(scripted) as watched:
        scripted.answers.append(ScriptedAnswer((page("vllm-0.32.0-completion-tokens.sse"),)))
        chunks = [chunk async for chunk in await watched.engine.submit(fetching())]
        assert [token for chunk in chunks for token in chunk.token_ids] == [1629, 1581, 1629]
        scripted.answers.append(ScriptedAnswer(ends=AnswerEnd.HELD))
        stream = await watched.engine.submit(fetching())
        call = await scripted.called(2)
        stream.cancel("the client left")
        await call.left.wait()

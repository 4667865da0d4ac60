"""An engine behind its own server, as the worker next to it has it: the answers to its legs."""

import asyncio
import json

import pytest
from msgspec.structs import replace

from kvrouter.core.errors import InvalidRequest
from kvrouter.core.requests import Bootstrap, EngineChunk, EngineRequest, FinishReason, KvLoss, Leg
from kvrouter.transports.requests.port import StreamBroken, WorkerFull, WorkerUnreachable
from tests.support.engine_legs import client_call, leg, said_hi
from tests.support.engine_probed import attached
from tests.support.engine_server import JSON, Answer, Ends, event_of, page, scripted_engine


async def test_a_streamed_leg_passes_the_engines_bytes() -> None:
    async with scripted_engine() as scripted, attached(scripted) as watched:
        scripted.answers.append(Answer((page("vllm-0.32.0-completion-tokens.sse"),)))
        chunks = [chunk async for chunk in await watched.engine.submit(said_hi())]
        assert [token for chunk in chunks for token in chunk.token_ids] == [1629, 1581, 1629]
        assert chunks[-1].finish is FinishReason.LENGTH
        assert b'"prompt_token_ids":[' not in b"".join(chunk.raw for chunk in chunks)
        call = await scripted.called()
        assert (call.path, call.body["return_token_ids"]) == ("/v1/completions", True)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (Answer.error(404, "vllm-0.32.0-error-model.json"), InvalidRequest),
        (Answer((b"",), status=503), WorkerFull),
        (Answer(ends=Ends.REFUSED), StreamBroken),
    ],
)
async def test_a_streamed_leg_that_is_refused_tells_so_when_it_is_read(
    answer: Answer, kind: type[Exception]
) -> None:
    async with scripted_engine() as scripted, attached(scripted) as watched:
        scripted.answers.append(answer)
        stream = await watched.engine.submit(said_hi())
        with pytest.raises(kind):
            await anext(aiter(stream))
        with pytest.raises(StopAsyncIteration):
            await anext(aiter(stream))


async def test_a_streamed_leg_is_accepted_before_the_engine_sends_the_head_of_its_answer() -> None:
    async with scripted_engine() as scripted, attached(scripted) as watched:
        scripted.answers.append(Answer(ends=Ends.NO_HEADERS))
        await watched.engine.submit(said_hi())
        await scripted.called()


@pytest.mark.parametrize("request_", [said_hi(stream=False), said_hi(kind=Leg.PREFILL)])
async def test_a_whole_answer_is_accepted_at_once_and_the_read_tells_what_was_wrong(
    request_: EngineRequest,
) -> None:
    async with scripted_engine() as scripted, attached(scripted) as watched:
        whole = Answer((page("vllm-0.32.0-completion.json"),), content_type=JSON)
        scripted.answers.extend([Answer.error(404, "vllm-0.32.0-error-model.json"), whole])
        refused = await watched.engine.submit(request_)
        with pytest.raises(InvalidRequest, match="does not exist"):
            await anext(aiter(refused))
        chunks = [chunk async for chunk in await watched.engine.submit(request_)]
        assert [chunk.finish for chunk in chunks] == [FinishReason.LENGTH]


async def test_a_prefill_with_tools_is_served_by_an_engine_without_a_parser_for_them() -> None:
    """vLLM without --enable-auto-tool-choice refuses tools that may be called."""
    call = client_call({"messages": [], "tools": [{"type": "function", "function": {"name": "f"}}]})
    async with scripted_engine() as scripted, attached(scripted) as watched:
        refusal = Answer.error(400, "vllm-0.32.0-error-field.json")
        scripted.answers.extend([refusal, Answer((page("vllm-0.32.0-completion.json"),), content_type=JSON)])
        chunks = [chunk async for chunk in await watched.engine.submit(leg(kind=Leg.PREFILL, call=call))]
        assert [chunk.finish for chunk in chunks] == [FinishReason.LENGTH]
        assert [asked.body.get("tool_choice") for asked in scripted.calls] == [None, "none"]
        scripted.answers.extend([refusal, refusal])
        stream = await watched.engine.submit(leg(kind=Leg.PREFILL, call=call))
        with pytest.raises(InvalidRequest):
            await anext(aiter(stream))
        assert len(scripted.calls) == 4


TOOLS = [{"type": "function", "function": {"name": "f", "description": "about it " * 9}}]
PREFILLED = {"remote_host": "there", "remote_block_ids": [1]}


def prefilled(prompt_tokens: int) -> Answer:
    said = {"choices": [{"finish_reason": "length"}], "kv_transfer_params": PREFILLED}
    body = {**said, "usage": {"prompt_tokens": prompt_tokens}}
    return Answer((json.dumps(body).encode(),), content_type=JSON)


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "f"}}, "auto", None]
)
async def test_a_prefill_engine_that_leaves_tools_out_where_none_may_be_called_prefills_no_other_prompt(
    choice: object,
) -> None:
    """As vLLM with --exclude-tools-when-tool-choice-none: its prompt has fewer tokens than the call has."""
    call = client_call({"messages": [], "tools": TOOLS, "tool_choice": choice})
    request = leg(tuple(range(90)), kind=Leg.PREFILL, call=call)
    refusal = Answer.error(400, "vllm-0.32.0-error-field.json")
    first_asked = [choice] if choice in ("auto", None) else []
    async with scripted_engine() as scripted, attached(scripted) as watched:

        async def prefill(*answers: Answer) -> object:
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


async def test_a_cancelled_leg_is_gone_at_the_engine_too() -> None:
    async with scripted_engine() as scripted, attached(scripted) as watched:
        scripted.answers.extend([Answer(ends=Ends.HELD), Answer(ends=Ends.NO_HEADERS)])
        for i, request in enumerate((said_hi(), said_hi(stream=False))):
            stream = await watched.engine.submit(request)
            call = await scripted.called(i + 1)
            stream.cancel("the client left")
            await call.left.wait()


async def test_a_leg_that_nobody_wants_while_its_headers_are_awaited_is_gone_too() -> None:
    async with scripted_engine() as scripted, attached(scripted) as watched:
        scripted.answers.append(Answer(ends=Ends.NO_HEADERS))
        stream = await watched.engine.submit(said_hi())
        reading = asyncio.ensure_future(anext(aiter(stream)))
        call = await scripted.called()
        stream.cancel("the client left")
        await call.left.wait()
        assert await reading == EngineChunk(finish=FinishReason.CANCELLED, error="the client left")


def fetching(*, stream: bool = True, bootstrap: bool = False) -> EngineRequest:
    """A decode leg that comes for its KV."""
    if bootstrap:
        return replace(said_hi(stream=stream, kind=Leg.DECODE), bootstrap=Bootstrap("h", 1, 2))
    return replace(said_hi(stream=stream, kind=Leg.DECODE), kv_transfer_params={"remote_port": 1})


DIED = {"error": {"message": "no KV came", "code": 500}}
TOKEN = {"choices": [{"index": 0, "text": "x", "token_ids": [1], "finish_reason": None}]}
DOWN = Answer((b'{"error":{"message":"no KV came"}}',), status=500)


@pytest.mark.parametrize(
    ("request_", "answer"),
    [
        (fetching(), DOWN),
        (fetching(bootstrap=True), DOWN),
        (fetching(), Answer((event_of(DIED),))),
        (fetching(stream=False), DOWN),
        (fetching(stream=False), Answer((event_of(DIED)[6:],), content_type=JSON)),
    ],
)
async def test_a_decode_leg_that_fails_before_its_first_token_did_not_get_its_kv(
    request_: EngineRequest, answer: Answer
) -> None:
    async with scripted_engine() as scripted, attached(scripted) as watched:
        scripted.answers.append(answer)
        (chunk,) = [chunk async for chunk in await watched.engine.submit(request_)]
    assert (chunk.finish, chunk.kv_lost) == (FinishReason.ERROR, KvLoss.BROKEN)
    assert "no KV came" in str(chunk.error)


@pytest.mark.parametrize(
    ("request_", "answer", "kind"),
    [
        (fetching(), Answer((event_of(TOKEN), event_of(DIED))), StreamBroken),
        (fetching(), Answer((event_of(TOKEN),), ends=Ends.CUT), StreamBroken),
        (fetching(), Answer(ends=Ends.CUT), StreamBroken),
        (fetching(), Answer(ends=Ends.REFUSED), StreamBroken),
        (fetching(stream=False), Answer(ends=Ends.REFUSED), StreamBroken),
        (fetching(), Answer((b"",), status=503), WorkerFull),
        (fetching(), Answer.error(404, "vllm-0.32.0-error-model.json"), InvalidRequest),
        (said_hi(), DOWN, WorkerUnreachable),
        (said_hi(kind=Leg.DECODE), DOWN, WorkerUnreachable),
        (said_hi(), Answer((event_of(DIED),)), StreamBroken),
        (said_hi(kind=Leg.PREFILL), DOWN, WorkerUnreachable),
    ],
)
async def test_any_other_failure_is_the_engines_or_the_calls(
    request_: EngineRequest, answer: Answer, kind: type[Exception]
) -> None:
    async with scripted_engine() as scripted, attached(scripted) as watched:
        scripted.answers.append(answer)
        with pytest.raises(kind):
            assert all([chunk.kv_lost is None async for chunk in await watched.engine.submit(request_)])


async def test_a_decode_leg_that_gets_its_kv_is_as_any_other_and_can_be_cancelled() -> None:
    async with scripted_engine() as scripted, attached(scripted) as watched:
        scripted.answers.append(Answer((page("vllm-0.32.0-completion-tokens.sse"),)))
        chunks = [chunk async for chunk in await watched.engine.submit(fetching())]
        assert [token for chunk in chunks for token in chunk.token_ids] == [1629, 1581, 1629]
        scripted.answers.append(Answer(ends=Ends.HELD))
        stream = await watched.engine.submit(fetching())
        call = await scripted.called(2)
        stream.cancel("the client left")
        await call.left.wait()

"""What OpenAI's own client sends with the names of Dynamo's users, to a whole system."""

import asyncio
import logging

import openai
import pytest

from kvrouter.settings.tree import FrontendSettings, UnknownNvext
from tests.testing.mock_fleet import uniform_fleet, zoned_fleet
from tests.testing.mock_server import MODEL, MockServer, mock_server, user, word_ids, words

WORKERS = "x-kvrouter-prefill-worker", "x-kvrouter-decode-worker"


async def went(
    here: MockServer, *, headers: dict[str, str] | None = None, **nvext: object
) -> tuple[str, ...]:
    raw = await here.openai.chat.completions.with_raw_response.create(
        model=MODEL,
        messages=user(words(n=80)),
        max_tokens=2,
        extra_headers=headers,
        extra_body={"nvext": nvext},
    )
    return tuple(raw.headers[name] for name in WORKERS)


async def test_both_legs_go_to_the_named_workers() -> None:
    async with mock_server(zoned_fleet()) as here:
        for _ in range(3):
            assert await went(here, decode_worker_id=6, prefill_worker_id=4) == ("4", "6")
            assert await went(here, backend_instance_id=2) == ("1", "2")
            assert await went(here, headers={"x-dynamo-worker-instance-id": "5"}) == ("4", "5")
            by_header = {"x-dynamo-prefill-instance-id": "1", "x-dynamo-worker-instance-id": "3"}
            assert await went(here, headers=by_header) == ("1", "3")
        with pytest.raises(openai.BadRequestError, match=r"nvext\.worker_id says the same") as caught:
            await went(here, worker_id=2, decode_worker_id=3)
        assert caught.value.param == "nvext.decode_worker_id"
        await here.until_quiet()


async def test_a_routing_query_is_answered_and_sent_to_no_worker() -> None:
    """As Dynamo's clients ask in two steps: where would it go, and then there with the same tokens."""
    async with mock_server(zoned_fleet()) as here:
        content = words(n=90)
        asking = {"nvext": {"annotations": ["query_instance_id:"]}}
        whole = await here.openai.chat.completions.create(
            model=MODEL, messages=user(content), extra_body=asking
        )
        stream = await here.openai.chat.completions.create(
            model=MODEL, messages=user(content), extra_body=asking, stream=True
        )
        chunks = [chunk async for chunk in stream]
        assert whole.choices[0].message.content == ""
        assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, "stop"]
        for answer in (whole, chunks[-1]):
            nvext = (answer.model_extra or {})["nvext"]
            workers, token_ids = nvext["worker_id"], nvext["token_ids"]
            assert (workers["prefill_worker_id"], workers["decode_worker_id"]) in {
                (1, 2), (1, 3), (4, 5), (4, 6)
            }  # fmt: skip
            assert set(word_ids(n=90)) <= set(token_ids)
        assert (await here.metrics()).value("decisions_total") == 0
        sent = await here.openai.chat.completions.create(
            model=MODEL,
            messages=user("these words are not read"),
            max_tokens=3,
            temperature=0,
            extra_body={"nvext": {"token_data": token_ids, **_pinned(workers)}},
        )
        plain = await here.openai.chat.completions.create(
            model=MODEL, messages=user(content), max_tokens=3, temperature=0
        )
        assert sent.usage is not None
        assert sent.usage.prompt_tokens == len(token_ids)
        assert sent.choices[0].message.content == plain.choices[0].message.content
        with pytest.raises(openai.BadRequestError, match="vocabulary") as caught:
            await went(here, token_data=[1, 2**31])
        assert caught.value.param == "nvext.token_data[1]"
        with pytest.raises(openai.BadRequestError, match="must not be empty"):
            await went(here, token_data=[])
        await here.until_quiet()


def _pinned(workers: dict[str, int]) -> dict[str, int]:
    return {name: workers[name] for name in ("prefill_worker_id", "decode_worker_id")}


async def test_an_aggregated_worker_is_named_for_both_legs() -> None:
    async with mock_server(uniform_fleet(replicas=2)) as here:
        answer = await here.openai.completions.create(
            model=MODEL,
            prompt=words(n=40),
            extra_body={"nvext": {"annotations": ["query_instance_id:"]}},
        )
        workers = (answer.model_extra or {})["nvext"]["worker_id"]
        assert workers["prefill_worker_id"] == workers["decode_worker_id"]


async def test_unknown_hints_are_refused_or_ignored_by_setting(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hints = {"osl": 5}
    async with mock_server(zoned_fleet()) as here:
        with pytest.raises(openai.BadRequestError, match="has no effect here") as caught:
            await went(here, agent_hints=hints, worker_id=2)
        assert caught.value.param == "nvext.agent_hints.osl"
    settings = FrontendSettings(unknown_nvext=UnknownNvext.IGNORE)
    with caplog.at_level(logging.WARNING, "kvrouter.frontend"):
        async with mock_server(zoned_fleet(), frontend=settings) as here:
            for workers in await asyncio.gather(
                *(went(here, agent_hints=hints, worker_id=2) for _ in range(4))
            ):
                assert workers[1] == "2"
    reported = [record for record in caplog.records if record.name == "kvrouter.frontend"]
    assert len(reported) == 1

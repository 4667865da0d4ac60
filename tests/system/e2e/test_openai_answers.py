"""What OpenAI's own client gets from the whole system, when everything goes well."""

import asyncio
import json

import pytest
from openai.types.chat import ChatCompletionChunk

from tests.testing.mock_fleet import uniform_fleet, zoned_fleet
from tests.testing.mock_server import MODEL, MockServer, mock_server, user, word_ids, words

HANDOFFS = pytest.mark.parametrize("handoff", ["bootstrap", "synchronous"])


async def streamed(here: MockServer, content: str, **options: object) -> list[ChatCompletionChunk]:
    stream = await here.openai.chat.completions.create(
        model=MODEL,
        messages=user(content),
        stream=True,
        max_tokens=20,
        extra_body=options,
    )
    return [chunk async for chunk in stream]


def text_of(chunks: list[ChatCompletionChunk]) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


@HANDOFFS
async def test_chats_and_completions_are_answered_whole_and_streamed(handoff: str) -> None:
    async with mock_server(zoned_fleet(handoff=handoff)) as here:
        content = words(n=50)
        chat = await here.openai.chat.completions.create(
            model=MODEL, messages=user(content), max_tokens=20, temperature=0
        )
        chunks = await streamed(here, content, temperature=0, stream_options={"include_usage": True})
        assert chat.choices[0].message.role == "assistant"
        assert chat.choices[0].message.content == text_of(chunks)
        assert len((chat.choices[0].message.content or "").split()) == 20, "each token is a word"
        assert chat.choices[0].finish_reason == "length"
        assert chat.usage is not None
        assert chat.usage.completion_tokens == 20
        assert chat.usage.total_tokens == chat.usage.prompt_tokens + 20
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.prompt_tokens == chat.usage.prompt_tokens > 50
        assert chunks[-1].usage.completion_tokens == 20
        roles = [chunk.choices[0].delta.role for chunk in chunks if chunk.choices]
        assert [role for role in roles if role] == ["assistant"]
        finishes = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
        assert [finish for finish in finishes if finish] == ["length"]

        by_text = await here.openai.completions.create(
            model=MODEL, prompt=content, max_tokens=20, temperature=0
        )
        by_ids = await here.openai.completions.create(
            model=MODEL, prompt=word_ids(n=50), max_tokens=20, temperature=0
        )
        assert by_text.choices[0].text == by_ids.choices[0].text
        assert by_ids.usage is not None
        assert by_ids.usage.prompt_tokens == 50
        stream = await here.openai.completions.create(
            model=MODEL, prompt=word_ids(n=50), max_tokens=20, temperature=0, stream=True
        )
        pieces = [event.choices[0].text async for event in stream]
        assert "".join(pieces) == by_ids.choices[0].text


async def test_a_repeated_chat_finds_its_cached_blocks() -> None:
    async with mock_server(uniform_fleet(replicas=3)) as here:
        content = words(n=200)
        for expect_cached in (False, True):
            chat = await here.openai.chat.completions.create(
                model=MODEL, messages=user(content), max_tokens=4
            )
            assert chat.usage is not None
            assert chat.usage.prompt_tokens_details is not None
            cached_tokens = chat.usage.prompt_tokens_details.cached_tokens or 0
            assert (cached_tokens > 190) == expect_cached


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_strings_across_tokens_end_the_answer(stream: bool) -> None:
    async with mock_server(uniform_fleet()) as here:
        content = words(n=30)
        whole = text_of(await streamed(here, content, temperature=0))
        third, fourth = whole.split()[2:4]
        across = f"{third[-2:]} {fourth[:2]}"
        for stop in (f" {fourth}", across, ["never said", across]):
            if stream:
                chunks = await streamed(here, content, temperature=0, stop=stop)
                text, finish = text_of(chunks), chunks[-1].choices[0].finish_reason
            else:
                chat = await here.openai.chat.completions.create(
                    model=MODEL, messages=user(content), max_tokens=20, temperature=0, stop=stop
                )
                text, finish = chat.choices[0].message.content or "", chat.choices[0].finish_reason
            said = stop if isinstance(stop, str) else stop[-1]
            assert text == whole[: whole.index(said)]
            assert finish == "stop"
        await here.until_quiet()


async def test_models_are_listed_and_found() -> None:
    async with mock_server(zoned_fleet()) as here:
        listed = await here.openai.models.list()
        assert [model.id for model in listed.data] == [MODEL]
        assert (await here.openai.models.retrieve(MODEL)).id == MODEL


@HANDOFFS
async def test_headers_and_nvext_name_the_workers(handoff: str) -> None:
    async with mock_server(zoned_fleet(handoff=handoff)) as here:
        raw = await here.openai.chat.completions.with_raw_response.create(
            model=MODEL,
            messages=user(words(n=100)),
            max_tokens=5,
            extra_body={"nvext": {"extra_fields": ["worker_id", "timing"]}},
        )
        headers, nvext = raw.headers, json.loads(raw.content)["nvext"]
        prefill, decode = headers["x-kvrouter-prefill-worker"], headers["x-kvrouter-decode-worker"]
        assert (int(prefill), int(decode)) in {(1, 2), (1, 3), (4, 5), (4, 6)}
        zone = "zone=a" if prefill == "1" else "zone=b"
        assert headers["x-kvrouter-prefill-domain"] == headers["x-kvrouter-decode-domain"] == zone
        assert headers["x-kvrouter-overlap-blocks"] == "0"
        assert nvext["worker_id"]["prefill_worker_id"] == int(prefill)
        assert nvext["worker_id"]["decode_worker_id"] == int(decode)
        assert 0 <= nvext["timing"]["queue_ms"] <= nvext["timing"]["ttft_ms"]
        assert nvext["timing"]["ttft_ms"] <= nvext["timing"]["total_time_ms"]
        kept = (await here.http.get(f"/v1/decisions/{headers['x-request-id']}")).json()
        assert kept["attempts"][-1]["decode"]["worker_id"] == int(decode)
        assert kept["attempts"][0]["prefill"]["worker_id"] == int(prefill)


async def test_constraints_and_pins_choose_a_requests_workers() -> None:
    async with mock_server(zoned_fleet()) as here:
        for zone, workers in (("a", {"2", "3"}), ("b", {"5", "6"})):
            constraints = {"required_taints": [f"dynamo.topology/zone={zone}"]}
            for n in range(3):
                raw = await here.openai.completions.with_raw_response.create(
                    model=MODEL,
                    prompt=words(first=n),
                    max_tokens=2,
                    extra_body={"nvext": {"routing_constraints": constraints}},
                )
                assert raw.headers["x-kvrouter-decode-worker"] in workers
        pinned = await here.openai.completions.with_raw_response.create(
            model=MODEL, prompt=words(), max_tokens=2, extra_body={"nvext": {"worker_id": 6}}
        )
        assert pinned.headers["x-kvrouter-decode-worker"] == "6"
        assert pinned.headers["x-kvrouter-prefill-worker"] == "4"


async def test_an_explanation_matches_the_requests_routing() -> None:
    async with mock_server(zoned_fleet()) as here:
        body = {"model": MODEL, "messages": user(words(n=80)), "max_tokens": 3}
        await here.http.post("/v1/chat/completions", json=body)
        headers = {"x-request-id": "the-same-id"}
        explained = (await here.http.post("/v1/route/explain", json=body, headers=headers)).json()
        response = await here.http.post("/v1/chat/completions", json=body, headers=headers)
        assert response.headers["x-kvrouter-decode-worker"] == str(explained["decode"]["chosen"]["worker_id"])
        assert response.headers["x-kvrouter-prefill-worker"] == str(
            explained["prefill"]["chosen"]["worker_id"]
        )
        overlaps = [row["overlap_blocks"] for row in explained["prefill"]["candidates"] if row["chosen"]]
        assert response.headers["x-kvrouter-overlap-blocks"] == str(overlaps[0])


async def test_concurrent_clients_each_get_their_own_answer() -> None:
    async with mock_server(zoned_fleet()) as here:

        async def ask(n: int) -> str:
            completion = await here.openai.completions.create(
                model=MODEL, prompt=words(first=n, n=30 + n), max_tokens=25, temperature=0
            )
            return completion.choices[0].text

        alone = [await ask(n) for n in range(12)]
        together = await asyncio.gather(*(ask(n % 12) for n in range(36)))
        assert together == alone * 3
        assert len(set(alone)) == 12

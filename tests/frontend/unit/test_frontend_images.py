"""Calls with pictures: nobody here knows their tokens, and a conversation about one stays where it was."""

import json

import httpx
import pytest
from msgspec import structs

from kvrouter.core.requests import EngineChunk, FinishReason, Leg
from kvrouter.core.workers import WorkerCard
from kvrouter.settings.router_settings import KvRouterConfig
from tests.testing.frontend_harness import FrontendHarness, running_frontend
from tests.testing.router_harness import MODEL, card
from tests.testing.scripted_transport import ScriptedStream

N_WORKERS = 5
BIG = 300 * 1024


def engines() -> list[WorkerCard]:
    return [structs.replace(card(number), takes_calls=True) for number in range(1, N_WORKERS + 1)]


def answers(stream: ScriptedStream) -> None:
    body = json.dumps({"choices": []}).encode()
    cached = 0 if stream.request.leg is Leg.AGGREGATED else None
    stream.feed(EngineChunk(raw=body, finish=FinishReason.STOP, cached_tokens=cached))


def shown(picture: str, question: str) -> list[dict[str, object]]:
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}}
    return [
        {"role": "system", "content": "You look at pictures."},
        {"role": "user", "content": [{"type": "text", "text": question}, image]},
    ]


async def ask(frontend: FrontendHarness, messages: list[dict[str, object]]) -> httpx.Response:
    return await frontend.http.post("/v1/chat/completions", json={"model": MODEL, "messages": messages})


def place(response: httpx.Response) -> tuple[str, int]:
    """Which worker answered, and how many blocks were counted on."""
    assert response.status_code == 200, response.text
    return response.headers["x-kvrouter-decode-worker"], int(response.headers["x-kvrouter-overlap-blocks"])


@pytest.mark.parametrize("picture", ["AAAA", "A" * BIG], ids=["small", "big"])
async def test_a_conversation_about_a_picture_stays_with_its_worker(picture: str) -> None:
    messages = shown(picture, "What is this? Answer in so many words that it fills a few blocks.")
    by_blocks = KvRouterConfig(router_cost="blocks")  # which a machine's pauses cannot turn
    async with running_frontend(*engines(), script=answers, config=by_blocks) as frontend:
        worker, blocks = place(await ask(frontend, messages))
        assert blocks == 0
        for turn in range(2 * N_WORKERS):
            messages += [
                {"role": "assistant", "content": "It is a cat."},
                {"role": "user", "content": f"And now, number {turn}?"},
            ]
            then, more = place(await ask(frontend, messages))
            assert then == worker
            assert more > blocks, "the turns before it are there too"
            blocks = more


async def test_a_chat_with_another_picture_shares_fewer_blocks() -> None:
    async with running_frontend(*engines(), script=answers) as frontend:
        _, _ = place(await ask(frontend, shown("AAAA", "What is this?")))
        _, again = place(await ask(frontend, shown("AAAA", "What is this?")))
        _, other = place(await ask(frontend, shown("BBBB", "What is this?")))
    assert again > other


async def test_text_prompts_are_never_predicted_to_be_cached() -> None:
    async with running_frontend(*engines(), script=answers) as frontend:
        for _ in range(3):
            _, blocks = place(await ask(frontend, [{"role": "user", "content": "Many words " * 20}]))
            assert blocks == 0, "no engine published a block"


async def test_predictions_for_images_do_not_count_against_the_index() -> None:
    async with running_frontend(*engines(), script=answers) as frontend:
        for _ in range(3):
            _, blocks = place(await ask(frontend, shown("AAAA", "What is this?")))
        page = (await frontend.http.get("/metrics")).text
    assert blocks > 0, "the engine says that nothing of it was cached"
    assert "kvrouter_index_predictions_total{" not in page

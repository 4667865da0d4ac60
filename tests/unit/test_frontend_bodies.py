"""How long bodies may be, route by route, and what long ones are read in."""

import threading
from collections.abc import AsyncIterator

import msgspec
import pytest
from msgspec import structs

from kvrouter.config import FrontendSettings
from kvrouter.core.workers import WorkerCard
from kvrouter.frontend import bodies
from kvrouter.frontend.bodies import BESIDE_PROMPT_BYTES, BODY_BYTES_MAX, OFF_LOOP_BYTES, PAGE_BYTES_MAX
from kvrouter.frontend.openai import parse
from kvrouter.frontend.openai.scanned import BodyBounds, ScannedBody, scanned
from tests.support.fleets import MODEL, card
from tests.support.front import CONTEXT_TOKENS, House, error_of, open_house, says

CHAT = "/v1/chat/completions"
DERIVED_BYTES = BESIDE_PROMPT_BYTES + 3 * 16 * CONTEXT_TOKENS


def own(worker_id: int, *, context: int = CONTEXT_TOKENS, model: str = MODEL) -> WorkerCard:
    return structs.replace(card(worker_id, model=model), context_length=context)


def taking_calls() -> WorkerCard:
    return structs.replace(own(1), takes_calls=True)


async def refusal(house: House, path: str, size_bytes: int, *, chunked: bool = False) -> str | None:
    """What a body of spaces is refused with for its size alone; None when it is not."""

    async def pieces() -> AsyncIterator[bytes]:
        left = size_bytes
        while left:
            yield b" " * min(left, 1 << 20)
            left -= min(left, 1 << 20)

    response = await house.http.post(path, content=pieces() if chunked else b" " * size_bytes)
    if response.status_code != 413:
        assert response.status_code == 400, response.text
        return None
    error = error_of(response)
    assert error["code"] == "request_too_large"
    return str(error["message"])


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/route/explain"])
async def test_a_body_is_as_long_as_the_longest_context_can_need(path: str, chunked: bool) -> None:
    async with open_house(own(1)) as house:
        assert await refusal(house, path, DERIVED_BYTES, chunked=chunked) is None
        why = await refusal(house, path, DERIVED_BYTES + 1, chunked=chunked)
    assert why is not None
    assert f"over {DERIVED_BYTES} bytes" in why
    assert "KVROUTER_BODY_MAX_BYTES" in why


async def test_the_longest_context_counts_also_where_no_tokenizer_is_here() -> None:
    async with open_house(own(1), own(2, model="other", context=1_000_000)) as house:
        assert await refusal(house, CHAT, 12_000_000) is None
        assert await refusal(house, CHAT, BESIDE_PROMPT_BYTES + 12_000_001) is not None


@pytest.mark.parametrize("cards", [(), (own(2), taking_calls()), (taking_calls(),)])
async def test_who_may_send_pictures_or_is_not_known_yet_has_the_most(cards: tuple[WorkerCard, ...]) -> None:
    has_most = not cards or all(each.takes_calls for each in cards)
    async with open_house(*cards) as house:
        assert (await refusal(house, CHAT, DERIVED_BYTES + 1) is None) == has_most
        assert await refusal(house, CHAT, BODY_BYTES_MAX + 1) is not None


@pytest.mark.parametrize("most_bytes", [1_000, 5_000_000])
async def test_a_setting_wins(most_bytes: int) -> None:
    async with open_house(own(1), settings=FrontendSettings(body_max_bytes=most_bytes)) as house:
        assert await refusal(house, CHAT, most_bytes) is None
        why = await refusal(house, CHAT, most_bytes + 1)
    assert why is not None
    assert f"over {most_bytes} bytes" in why


async def test_operators_routes_take_what_they_need() -> None:
    async with open_house(taking_calls()) as house:
        assert await refusal(house, "/busy_threshold", PAGE_BYTES_MAX) is None
        assert "no body of this route" in (await refusal(house, "/busy_threshold", PAGE_BYTES_MAX + 1) or "")


async def test_long_bodies_are_read_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[tuple[str, str]] = []

    def noted_scan(data: bytes, bounds: BodyBounds) -> ScannedBody:
        threads.append(("scan", threading.current_thread().name))
        return scanned(data, bounds)

    def noted_decode(decoder: "msgspec.json.Decoder[object]", body: ScannedBody) -> object:
        threads.append(("decode", threading.current_thread().name))
        return decoder.decode(body.data)

    monkeypatch.setattr(bodies, "scanned", noted_scan)
    monkeypatch.setattr(parse, "decode_body", noted_decode)
    async with open_house(own(1), script=says("ok")) as house:
        assert (await house.chat("hello")).status_code == 200
        assert (await house.chat("hello", metadata={"a": "x" * OFF_LOOP_BYTES})).status_code == 200
    here = threading.current_thread().name
    assert [(what, name == here) for what, name in threads] == [
        ("scan", True), ("decode", True), ("scan", False), ("decode", False),
    ]  # fmt: skip


async def test_as_many_token_ids_as_the_longest_context_holds() -> None:
    ids = b",".join([b"1"] * 300_000)
    body = b'{"model":"%s","prompt":[%s]}' % (MODEL.encode(), ids)
    async with open_house(own(1), own(2, model="other", context=300_000)) as house:
        reply = await house.http.post("/v1/completions", content=body)
        assert error_of(reply)["code"] == "context_length_exceeded"
        reply = await house.http.post("/v1/completions", content=body.replace(b"[", b"[1,", 1))
        assert (error_of(reply)["code"], error_of(reply)["param"]) == ("body_over_bounds", "prompt")
    async with open_house(own(1), settings=FrontendSettings(body_max_token_ids=10)) as house:
        assert error_of(await house.complete([1] * 11))["code"] == "body_over_bounds"

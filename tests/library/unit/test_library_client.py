"""Plain clients: what they refuse, and what is left on the workers when a reader leaves."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from kvrouter.app.mock_fleet import MockFleet
from kvrouter.core.errors import ContextLengthExceeded, InvalidRequest, ShuttingDown
from kvrouter.core.workers import WorkerCard
from kvrouter.library import AnswerPieces, Client, Endpoint, Runtime, mock_fleet
from tests.testing.mock_fleet import LONG_TOKENS, uniform_fleet
from tests.testing.router_harness import ScriptedDiscovery, ScriptedEvents, card
from tests.testing.scripted_transport import ScriptedTransport
from tests.testing.waits import until

LONG: Mapping[str, object] = {
    "token_ids": list(range(256, 300)),
    "stop_conditions": {"max_tokens": LONG_TOKENS, "ignore_eos": True},
}

Send = Callable[[Client], Awaitable[AnswerPieces]]

WAYS: dict[str, Send] = {
    "generate": lambda client: client.generate(LONG),
    "random": lambda client: client.random(LONG),
    "round_robin": lambda client: client.round_robin(LONG),
    "direct": lambda client: client.direct(LONG, 1),
}


def endpoint_of(fleet: MockFleet) -> Endpoint:
    runtime = Runtime(fleet.discovery, fleet.requests, fleet.events)
    return runtime.namespace("default").component("backend").endpoint("generate")


@asynccontextmanager
async def mock_client() -> AsyncIterator[tuple[MockFleet, Client]]:
    """A client before mock engines; at the end of a test that passes nothing may run on them."""
    async with MockFleet(uniform_fleet()) as fleet:
        client = await endpoint_of(fleet).client()
        yield fleet, client
        client.close()
        await until(lambda: fleet.cluster.idle)
        assert fleet.check_integrity() == []
        assert [worker.running_legs for worker in fleet.workers.values()] == [0, 0]


@pytest.mark.parametrize("way", sorted(WAYS))
async def test_closing_an_answer_after_some_tokens_leaves_nothing_running(way: str) -> None:
    async with mock_client() as (_, client):
        answers = await WAYS[way](client)
        async for piece in answers:
            assert piece["token_ids"]
            break
        await answers.aclose()
        assert [piece async for piece in answers] == []


async def test_breaking_out_of_an_answer_leaves_nothing_running() -> None:
    """The loop closes a generator that nobody holds any more."""
    async with mock_client() as (_, client):
        async for piece in await client.random(LONG):
            assert piece["token_ids"]
            break


async def test_an_unread_answer_leaves_nothing_running() -> None:
    async with mock_client() as (_, client):
        await (await client.random(LONG)).aclose()
        async with await client.random(LONG):
            pass


async def test_leaving_an_answers_context_stops_the_worker() -> None:
    async with mock_client() as (_, client):
        async with await client.random(LONG) as answers:
            await anext(answers)
        assert [piece async for piece in answers] == []


async def test_the_last_piece_of_an_answer_has_the_finish_reason() -> None:
    async with mock_client() as (_, client):
        request = {"token_ids": [300, 301], "stop_conditions": {"max_tokens": 3, "ignore_eos": True}}
        pieces = [piece async for piece in await client.round_robin(request)]
        assert sum(len(piece["token_ids"]) for piece in pieces) == 3
        assert pieces[-1]["finish_reason"] == "length"


REFUSED: list[tuple[Mapping[str, object], str]] = [
    ({}, "request"),
    ({"token_ids": []}, "token_ids"),
    ({"token_ids": [-1]}, "token_ids"),
    ({"token_ids": [2**32]}, "token_ids"),
    ({"token_ids": ["a"]}, "request.token_ids[0]"),
    ({"token_ids": [1], "temperature": 1}, "request"),
    (
        {"token_ids": [1], "sampling_options": {"temperature": float("nan")}},
        "request.sampling_options.temperature",
    ),
    ({"token_ids": [1], "dp_rank": 1}, "dp_rank"),
    ({"token_ids": [1], "dp_rank": -1}, "dp_rank"),
]


async def scripted_client(only: WorkerCard) -> tuple[ScriptedTransport, Client]:
    plane, discovery = ScriptedTransport(), ScriptedDiscovery()
    discovery.put(only)
    runtime = Runtime(discovery, plane, ScriptedEvents())
    return plane, await runtime.namespace("default").component("backend").endpoint("generate").client()


@pytest.mark.parametrize(("wrong", "param"), REFUSED)
async def test_invalid_arguments_name_their_field_and_send_nothing(
    wrong: Mapping[str, object], param: str
) -> None:
    plane, client = await scripted_client(card(1))
    with pytest.raises(InvalidRequest) as refused:
        await client.random(wrong)
    assert refused.value.param == param
    assert plane.opened == []


async def test_prompt_and_answer_over_the_workers_context_are_refused() -> None:
    plane, client = await scripted_client(card(1))
    for request, param in (
        ({"token_ids": [7] * 4096}, "token_ids"),
        ({"token_ids": [7] * 4090, "stop_conditions": {"max_tokens": 7}}, "stop_conditions.max_tokens"),
    ):
        with pytest.raises(ContextLengthExceeded) as refused:
            await client.direct(request, 1)
        assert refused.value.param == param
    await client.direct({"token_ids": [7] * 4090, "stop_conditions": {"max_tokens": 6}}, 1)
    assert len(plane.opened) == 1


async def test_a_request_without_a_rank_goes_to_the_workers_first_one() -> None:
    plane, client = await scripted_client(replace(card(1, dp_size=2), dp_start=4))
    for wished in (None, 4, 5):
        await client.direct({"token_ids": [7], "dp_rank": wished}, 1)
    assert [stream.request.dp_rank for stream in plane.opened] == [4, 4, 5]


async def test_a_closed_client_raises_and_sends_nothing() -> None:
    async with mock_client() as (_, client):
        client.close()
        for send in WAYS.values():
            with pytest.raises(ShuttingDown, match="closed"):
                await send(client)
        with pytest.raises(ShuttingDown, match="closed"):
            await client.wait_for_instances()


@pytest.mark.parametrize("as_given", [str, Path])
async def test_a_fleet_files_path_may_be_text(as_given: Callable[[str], str | Path], tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text("version: 1\nmodels: [{name: mock}]\nworkers: [{name: w, replicas: 3}]\n")
    async with mock_fleet(as_given(str(file))) as runtime:
        client = await runtime.namespace("default").component("backend").endpoint("generate").client()
        assert client.instance_ids() == [1, 2, 3]
        client.close()

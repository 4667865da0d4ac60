"""Programs before a split fleet: prefill workers have a router of their own, and pairs are named whole."""

import asyncio

import pytest
from msgspec.structs import replace

from kvrouter import KvIndexer, KvRouter
from kvrouter.core.errors import InvalidRequest, NoEligibleWorker
from kvrouter.core.ids import DpRank, WorkerId
from kvrouter.core.workers import Role
from kvrouter.library import AnswerPiece, AnswerPieces, Endpoint, Runtime
from tests.testing.blocks import reported_by
from tests.testing.embedding_program import Program, program, tokens_of
from tests.testing.mock_fleet import BLOCK, prompt, zoned_fleet
from tests.testing.router_harness import BLOCK_SIZE, ScriptedDiscovery, ScriptedEvents, card
from tests.testing.scripted_transport import ScriptedTransport

PROMPT = prompt()
PREFILL = {1, 4}
DECODE = {2, 3, 5, 6}
ZONE = dict.fromkeys((1, 2, 3), "a") | dict.fromkeys((4, 5, 6), "b")
HANDOFFS = pytest.mark.parametrize("handoff", ["bootstrap", "synchronous"])


def prefill_endpoint(here: Program) -> Endpoint:
    return here.runtime.namespace("default").component("prefill").endpoint("generate")


async def only_piece(answer: AnswerPieces) -> AnswerPiece:
    (piece,) = [piece async for piece in answer]
    return piece


async def test_a_prefill_endpoints_router_picks_and_books_prefill_workers() -> None:
    async with program(zoned_fleet()) as here, KvRouter(prefill_endpoint(here), BLOCK) as router:
        named = {(await router.best_worker(prompt(first=n)))[0] for n in range(40)}
        assert named == PREFILL
        best = await router.best_workers(PROMPT)
        assert best.decode is None
        assert best.prefill is not None
        worker_id, dp_rank, overlap_blocks = await router.best_worker(PROMPT, request_id="mine")
        assert (worker_id in PREFILL, dp_rank, overlap_blocks) == (True, 0, 0)
        loads = {load["worker_id"]: load for load in await router.get_potential_loads(PROMPT)}
        assert loads.keys() == PREFILL
        assert loads[worker_id]["potential_prefill_tokens"] == 200
        assert (await router.best_worker(PROMPT))[0] != worker_id, "what is booked counts"
        await router.mark_prefill_complete("mine")
        loads = {load["worker_id"]: load for load in await router.get_potential_loads(PROMPT)}
        assert {load["potential_prefill_tokens"] for load in loads.values()} == {100}
        assert len({load["potential_decode_blocks"] for load in loads.values()}) == 1, "nothing decodes there"
        await router.free("mine")


@HANDOFFS
async def test_a_pair_can_be_served_with_a_router_for_each_endpoint(handoff: str) -> None:
    async with (
        program(zoned_fleet(handoff=handoff)) as here,
        KvRouter(prefill_endpoint(here), BLOCK) as prefills,
        KvRouter(here.endpoint, BLOCK) as router,
    ):
        client = await here.endpoint.client()
        expected = await tokens_of(await router.generate(PROMPT, worker_id=2))
        found = await only_piece(await prefills.generate(prompt(), worker_id=1))
        assert (found["prefill_worker_id"], found["token_ids"]) == (1, [])
        request: dict[str, object] = {"token_ids": PROMPT.tolist(), "prefill_worker_id": 1}
        if handoff == "bootstrap":
            request["bootstrap"] = found["bootstrap"]
        else:
            request["kv_transfer_params"] = found["kv_transfer_params"]
        assert await tokens_of(await client.direct(request, 3)) == expected
        client.close()


async def test_a_direct_prefill_answer_has_its_kv_transfer_params() -> None:
    async with program(zoned_fleet(handoff="synchronous")) as here:
        senders, receivers = [await each.client() for each in (prefill_endpoint(here), here.endpoint)]
        request: dict[str, object] = {"token_ids": PROMPT.tolist()}
        whole = [piece async for piece in await senders.direct(request, 4)]
        params = whole[-1]["kv_transfer_params"]
        request.update(kv_transfer_params=params, prefill_worker_id=4)
        assert len(await tokens_of(await receivers.direct(request, 5))) == 16
        senders.close()
        receivers.close()


async def test_best_workers_names_both_workers_and_both_can_be_pinned() -> None:
    async with program(zoned_fleet()) as here, KvRouter(here.endpoint, BLOCK) as router:
        seen = set()
        for n in range(120):
            best = await router.best_workers(prompt(first=n))
            assert best.prefill is not None
            assert best.decode is not None
            assert ZONE[best.prefill.worker_id] == ZONE[best.decode.worker_id], "as the policy requires"
            seen |= {best.prefill.worker_id, best.decode.worker_id}
        assert seen == PREFILL | DECODE
        booked = await router.best_workers(PROMPT, request_id="mine")
        assert (await router.best_worker(PROMPT)) != booked.decode
        await router.free("mine")
        await tokens_of(await router.generate(PROMPT, worker_id=5, prefill_worker_id=4))
        assert reported_by(here.fleet.workers[WorkerId(4)], DpRank(0))
        with pytest.raises(NoEligibleWorker):
            await tokens_of(await router.generate(PROMPT, worker_id=2, prefill_worker_id=4))
        with pytest.raises(InvalidRequest):
            await router.generate(PROMPT, prefill_dp_rank=0)


async def test_an_unread_prefill_leg_is_not_sent_and_a_cancelled_one_ends() -> None:
    async with (
        program(zoned_fleet(handoff="synchronous")) as here,
        KvRouter(prefill_endpoint(here), BLOCK) as router,
    ):
        unread = await router.generate(PROMPT, request_id="unread")
        await unread.aclose()
        assert here.fleet.cluster.idle
        reading = asyncio.ensure_future(anext(await router.generate(PROMPT, request_id="left")))
        await asyncio.sleep(0)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await router.best_worker(PROMPT, request_id="left")
        await router.free("left")
        with pytest.raises(InvalidRequest, match="says it already"):
            await router.generate(PROMPT, worker_id=1, prefill_worker_id=4)


async def test_a_running_prefill_leg_ends_with_its_router() -> None:
    async with program(zoned_fleet(handoff="bootstrap", speedup=1.0)) as here:
        async with KvRouter(prefill_endpoint(here), BLOCK) as router:
            await only_piece(await router.generate(PROMPT))
            assert not here.fleet.cluster.idle
        others = asyncio.all_tasks() - {asyncio.current_task()}
        assert not [task for task in others if "PrefillDispatch" in repr(task.get_coro())]
        async with asyncio.timeout(60.0):
            await here.until_quiet()


async def test_an_indexer_covers_only_its_endpoints_workers() -> None:
    async with (
        program(zoned_fleet()) as here,
        KvRouter(here.endpoint, BLOCK) as router,
        KvIndexer(here.endpoint, BLOCK) as decodes,
        KvIndexer(prefill_endpoint(here), BLOCK) as prefills,
    ):
        await tokens_of(await router.generate(PROMPT, worker_id=2, stop_conditions={"max_tokens": 1}))
        for indexer, expected in ((prefills, {1: 6}), (decodes, {2: 6})):
            found: dict[int, int] = {}
            while not found:
                found = await indexer.find_matches_for_request(PROMPT)
                await asyncio.sleep(0)
            assert found == expected


async def test_an_endpoint_names_only_prefill_until_its_decode_worker_joins() -> None:
    discovery = ScriptedDiscovery()
    runtime = Runtime(discovery, ScriptedTransport(), ScriptedEvents())
    endpoint = runtime.namespace("default").component("backend").endpoint("generate")
    async with KvRouter(endpoint, BLOCK_SIZE) as router:

        async def named() -> tuple[int | None, int | None]:
            best = await router.best_workers([1, 2, 3])
            return (
                None if best.prefill is None else best.prefill.worker_id,
                None if best.decode is None else best.decode.worker_id,
            )

        discovery.put(replace(card(1, Role.PREFILL), component="elsewhere"))
        with pytest.raises(NoEligibleWorker):
            await named()
        discovery.put(card(2, Role.PREFILL))
        assert await named() == (2, None)
        discovery.put(card(3, Role.DECODE))
        assert {await named() for _ in range(50)} == {(1, 3), (2, 3)}
        discovery.drop(2)
        assert await named() == (1, 3)
        discovery.drop(3)
        with pytest.raises(NoEligibleWorker, match="decode"):
            await named()

"""KvRouter and KvIndexer: the methods that programs build on, one by one."""

import asyncio
import json
from contextlib import AsyncExitStack

import pytest

import kvrouter
from kvrouter import KvIndexer, KvPushRouter, KvRouter, KvRouterConfig
from kvrouter.core.constraints import RoutingConstraints
from kvrouter.core.errors import (
    InvalidRequest,
    NoEligibleWorker,
    UnknownModel,
)
from kvrouter.core.events import KvEvent, Stored
from kvrouter.core.ids import DpRank, Taint, WorkerId, WorkerRank
from tests.testing.blocks import reported_by
from tests.testing.embedding_program import program, tokens_of
from tests.testing.mock_fleet import BLOCK, LONG_TOKENS, fleet_file, prompt, uniform_fleet, zoned_fleet

PROMPT = prompt()
"""100 tokens: 6 full blocks of 16, and a tail."""

Loads = dict[int, tuple[int, int]]


async def loads(router: KvRouter, token_ids: list[int]) -> Loads:
    """Potential prefill tokens and decode blocks by worker; all workers here have one rank."""
    found = await router.get_potential_loads(token_ids)
    assert {load["dp_rank"] for load in found} == {0}
    return {
        load["worker_id"]: (load["potential_prefill_tokens"], load["potential_decode_blocks"])
        for load in found
    }


async def until_cached(router: KvRouter, worker_id: int, blocks: int) -> None:
    """Return once the router knows that the worker holds so many blocks of the prompt."""
    found: Loads = {}
    while found.get(worker_id, (0, 0))[0] != len(PROMPT) - blocks * BLOCK:
        found = await loads(router, PROMPT.tolist())
        await asyncio.sleep(0)


def n_stored(events: tuple[KvEvent, ...]) -> int:
    return sum(event.n_blocks for event in events if isinstance(event, Stored))


def test_kv_push_router_is_kv_router_and_public_names_exist() -> None:
    assert KvPushRouter is KvRouter
    for name in kvrouter.__all__:
        assert getattr(kvrouter, name) is not None
    with pytest.raises(AttributeError, match="nonsense"):
        kvrouter.nonsense  # noqa: B018 - what is asked is the point


async def test_generate_routes_sends_and_returns_the_answer() -> None:
    async with program(uniform_fleet()) as here, KvRouter(here.endpoint, BLOCK) as router:
        answer = await router.generate(PROMPT, "mock", stop_conditions={"max_tokens": 9})
        pieces = [piece async for piece in answer]
        assert sum(len(piece["token_ids"]) for piece in pieces) == 9
        assert [piece["finish_reason"] for piece in pieces if "finish_reason" in piece] == ["length"]
        assert "finish_reason" in pieces[-1]
        again = await router.generate(PROMPT.tolist(), stop_conditions={"max_tokens": 9})
        assert await tokens_of(again) == [token for piece in pieces for token in piece["token_ids"]]
        assert await loads(router, prompt(first=1).tolist()) == {1: (100, 7), 2: (100, 7)}, "all is freed"


async def test_sampling_reaches_the_engine() -> None:
    async with program(uniform_fleet(replicas=1)) as here, KvRouter(here.endpoint, BLOCK) as router:

        async def ask(**sampling: object) -> list[int]:
            return await tokens_of(await router.generate(PROMPT, sampling_options=sampling))

        greedy = await ask(temperature=0.0)
        assert len(greedy) == 16, "the default"
        assert await ask(temperature=0.0, seed=5) == greedy
        assert await ask(temperature=1.0, seed=5) != greedy
        assert await ask(temperature=1.0, seed=5) == await ask(temperature=1.0, seed=5)


async def test_leaving_an_answer_cancels_it() -> None:
    async with program(zoned_fleet()) as here, KvRouter(here.endpoint, BLOCK) as router:
        answer = await router.generate(PROMPT, stop_conditions={"max_tokens": LONG_TOKENS})
        await anext(answer)
        assert not here.fleet.cluster.idle
        await answer.aclose()
        await here.until_quiet()
        assert set((await loads(router, prompt(first=1).tolist())).values()) == {(100, 7)}
        async with await router.generate(PROMPT, stop_conditions={"max_tokens": LONG_TOKENS}) as answer:
            await anext(answer)
        await here.until_quiet()


async def test_best_worker_without_an_id_changes_nothing() -> None:
    async with program(uniform_fleet(replicas=3)) as here, KvRouter(here.endpoint, BLOCK) as router:
        before = await loads(router, PROMPT.tolist())
        first = await router.best_worker(PROMPT)
        for _ in range(20):
            worker_id, dp_rank, overlap_blocks = await router.best_worker(PROMPT)
            assert (dp_rank, overlap_blocks) == (0, 0)
            assert worker_id in {1, 2, 3}
        assert await loads(router, PROMPT.tolist()) == before
        assert first[2] == 0


async def test_best_worker_with_an_id_books_the_worker_until_freed() -> None:
    async with program(uniform_fleet()) as here, KvRouter(here.endpoint, BLOCK) as router:
        other = prompt(first=1).tolist()
        worker_id, dp_rank, overlap_blocks = await router.best_worker(PROMPT, request_id="by-hand")
        assert (dp_rank, overlap_blocks) == (0, 0)
        idle = 3 - worker_id
        assert await loads(router, other) == {worker_id: (200, 14), idle: (100, 7)}
        shared = await loads(router, PROMPT.tolist())
        assert shared == {worker_id: (200, 8), idle: (100, 7)}, "six blocks are shared, the tail is not"
        assert (await router.best_worker(other))[0] == idle, "the booked load counts"
        await router.mark_prefill_complete("by-hand")
        assert await loads(router, other) == {worker_id: (100, 14), idle: (100, 7)}
        await router.mark_prefill_complete("by-hand")
        await router.free("by-hand")
        assert await loads(router, other) == {worker_id: (100, 7), idle: (100, 7)}


async def test_freeing_or_booking_an_id_twice_is_an_error() -> None:
    async with program(uniform_fleet()) as here, KvRouter(here.endpoint, BLOCK) as router:
        await router.best_worker(PROMPT, request_id="mine")
        with pytest.raises(InvalidRequest, match="booked already") as twice:
            await router.best_worker(PROMPT, request_id="mine")
        assert twice.value.param == "request_id"
        await router.free("mine")
        for call in (router.free, router.mark_prefill_complete):
            with pytest.raises(InvalidRequest, match="not booked"):
                await call("mine")
        await router.best_worker(PROMPT, request_id="mine")
        await router.free("mine")
        assert await loads(router, PROMPT.tolist()) == {1: (100, 7), 2: (100, 7)}


async def test_deprecated_best_worker_id_returns_worker_and_overlap() -> None:
    async with program(uniform_fleet(replicas=1)) as here, KvRouter(here.endpoint, BLOCK) as router:
        assert await router.best_worker_id(PROMPT) == (1, 0)
        assert await router.best_worker_id(PROMPT, request_id="mine") == (1, 0)
        await router.free("mine")


async def test_best_worker_and_loads_count_cached_blocks() -> None:
    async with program(uniform_fleet()) as here, KvRouter(here.endpoint, BLOCK) as router:
        await tokens_of(await router.generate(PROMPT, worker_id=2, stop_conditions={"max_tokens": 1}))
        await until_cached(router, 2, 6)
        assert await router.best_worker(PROMPT) == (2, 0, 6)
        assert await loads(router, PROMPT.tolist()) == {1: (100, 7), 2: (4, 7)}


async def test_a_config_override_applies_to_one_request() -> None:
    """Worker 2 holds the blocks, and a load of 32 tokens: in blocks, for worker 2 it is
    (32 + 4) / 16 + 2 + 7 = 11.25 with overlap and 9 without, for worker 1 it is 13.25 and 7.
    """
    blocks = KvRouterConfig(router_cost="blocks")
    async with program(uniform_fleet()) as here, KvRouter(here.endpoint, BLOCK, blocks) as router:
        await tokens_of(await router.generate(PROMPT, worker_id=2, stop_conditions={"max_tokens": 1}))
        await until_cached(router, 2, 6)
        n = 0
        while (await loads(router, prompt(first=99).tolist()))[2] != (132, 9):  # of ties, some go to worker 2
            n += 1
            worker_id, _, _ = await router.best_worker(prompt(tokens=32, first=n), request_id=f"load-{n}")
            if worker_id == 1:
                await router.free(f"load-{n}")
        assert await router.best_worker(PROMPT) == (2, 0, 6)
        assert await router.best_worker(PROMPT, {"overlap_score_weight": 0.0}) == (1, 0, 0)
        assert await router.best_worker(PROMPT) == (2, 0, 6), "it held for one request"
        answer = await router.generate(
            PROMPT, router_config_override={"overlap_score_weight": 0.0}, stop_conditions={"max_tokens": 1}
        )
        await tokens_of(answer)
        await until_cached(router, 1, 6)
        await router.free(f"load-{n}")


async def test_pins_and_constraints_choose_the_worker_or_refuse() -> None:
    async with program(zoned_fleet()) as here, KvRouter(here.endpoint, BLOCK) as router:
        zone_b = RoutingConstraints(required_taints=frozenset({Taint("dynamo.topology/zone=b")}))
        for worker_id in (3, 6):
            await tokens_of(await router.generate(PROMPT, worker_id=worker_id))
            assert reported_by(here.fleet.workers[WorkerId(worker_id)], DpRank(0))
        await tokens_of(await router.generate(prompt(first=3), routing_constraints=zone_b))
        with pytest.raises(NoEligibleWorker):
            await tokens_of(await router.generate(PROMPT, worker_id=3, routing_constraints=zone_b))
        with pytest.raises(NoEligibleWorker):
            await tokens_of(await router.generate(PROMPT, worker_id=99))
        with pytest.raises(InvalidRequest):
            await router.generate(PROMPT, dp_rank=1)


async def test_dumped_events_equal_the_blocks_that_engines_hold() -> None:
    async with (
        program(uniform_fleet(replicas=2, dp_size=2)) as here,
        KvRouter(here.endpoint, BLOCK) as router,
    ):
        assert json.loads(await router.dump_events()) == []
        for n in range(4):
            await tokens_of(await router.generate(prompt(first=n), worker_id=1 + n % 2, dp_rank=n // 2))
        held = {
            WorkerRank(number, rank): n_stored(reported_by(worker, rank))
            for number, worker in here.fleet.workers.items()
            for rank in (DpRank(0), DpRank(1))
        }
        dumped: dict[WorkerRank, int] = {}
        while dumped != held:
            dumped = {}
            for event in json.loads(await router.dump_events()):
                rank = WorkerRank(event["worker_id"], event["dp_rank"])
                dumped[rank] = dumped.get(rank, 0) + len(event["blocks"])
                assert event["model"] == "mock"
                assert event["medium"] == "gpu"
                assert all({"block_hash", "sequence_hash"} == block.keys() for block in event["blocks"])
            await asyncio.sleep(0)
        assert len(held) == 4


async def test_dump_events_is_empty_without_an_index() -> None:
    config = KvRouterConfig(overlap_score_weight=0.0)
    async with program(uniform_fleet()) as here, KvRouter(here.endpoint, BLOCK, config) as router:
        await tokens_of(await router.generate(PROMPT))
        assert json.loads(await router.dump_events()) == []
        assert (await router.best_worker(PROMPT))[2] == 0


async def test_indexer_matches_are_of_the_best_rank_of_each_worker() -> None:
    async with AsyncExitStack() as stack:
        here = await stack.enter_async_context(program(uniform_fleet(replicas=3, dp_size=2)))
        router = await stack.enter_async_context(KvRouter(here.endpoint, BLOCK))
        indexer = await stack.enter_async_context(KvIndexer(here.endpoint, BLOCK))
        assert await indexer.find_matches_for_request(PROMPT) == {}
        for worker_id, dp_rank, tokens in ((1, 0, 100), (1, 1, 40), (3, 1, 50)):
            await tokens_of(
                await router.generate(
                    PROMPT[:tokens], worker_id=worker_id, dp_rank=dp_rank, stop_conditions={"max_tokens": 1}
                )
            )
        matches: dict[int, int] = {}
        while matches != {1: 6, 3: 3}:
            matches = await indexer.find_matches_for_request(PROMPT.tolist())
            await asyncio.sleep(0)


async def test_a_router_started_late_learns_the_cached_blocks() -> None:
    async with program(uniform_fleet()) as here:
        async with KvRouter(here.endpoint, BLOCK) as router:
            await tokens_of(await router.generate(PROMPT, worker_id=1))
        async with KvRouter(here.endpoint, BLOCK) as router, KvIndexer(here.endpoint, BLOCK) as indexer:
            await until_cached(router, 1, 6)
            assert await router.best_worker(PROMPT) == (1, 0, 6)
            assert await indexer.find_matches_for_request(PROMPT) == {1: 6}


async def test_prefill_workers_of_the_namespace_make_pairs() -> None:
    async with program(zoned_fleet()) as here, KvRouter(here.endpoint, BLOCK) as router:
        assert len(await tokens_of(await router.generate(PROMPT))) == 16
        assert sum(what.transfers for what in here.fleet.cluster.carried().values()) == 1
        assert set(await loads(router, PROMPT.tolist())) == {2, 3, 5, 6}, "the endpoint's own workers"
        worker_id, _, _ = await router.best_worker(PROMPT, request_id="mine")
        assert worker_id in {2, 3, 5, 6}
        await router.free("mine")


async def test_routers_drop_workers_that_leave() -> None:
    async with program(uniform_fleet(replicas=2)) as here, KvRouter(here.endpoint, BLOCK) as router:
        await router.best_worker(PROMPT, request_id="mine")
        for worker_id in (WorkerId(1), WorkerId(2)):
            await here.fleet.kill(worker_id)
        assert await router.get_potential_loads(PROMPT) == []
        with pytest.raises(NoEligibleWorker):
            await router.best_worker(PROMPT)
        await router.free("mine")


async def test_the_model_must_be_named_when_there_are_several() -> None:
    text = """
version: 1
models: [{name: small, block_size: 16}, {name: large, block_size: 16}]
workers: [{name: small, model: small}, {name: large, model: large}]
speedup: 1000
"""
    async with program(fleet_file(text)) as here, KvRouter(here.endpoint, BLOCK) as router:
        with pytest.raises(InvalidRequest, match="large, small"):
            await router.best_worker(PROMPT)
        assert (await router.best_worker(PROMPT, model="large"))[0] == 2
        with pytest.raises(UnknownModel):
            await router.best_worker(PROMPT, model="medium")


async def test_an_endpoint_without_usable_workers_refuses_requests() -> None:
    async with program(uniform_fleet()) as here:
        nobody = here.runtime.namespace("default").component("nobody").endpoint("generate")
        async with KvRouter(nobody, BLOCK) as router:
            with pytest.raises(NoEligibleWorker):
                await router.best_worker(PROMPT)
        async with KvRouter(here.endpoint, 2 * BLOCK) as router:
            with pytest.raises(NoEligibleWorker):
                await router.best_worker(PROMPT)


async def test_two_routers_in_one_process_are_independent() -> None:
    async with program(uniform_fleet()) as here, KvRouter(here.endpoint, BLOCK) as second:
        async with KvRouter(here.endpoint, BLOCK) as first:
            await first.best_worker(PROMPT, request_id="mine")
            assert set((await loads(second, PROMPT.tolist())).values()) == {(100, 7)}
            await second.best_worker(PROMPT, request_id="mine")
        assert len(await tokens_of(await second.generate(PROMPT))) == 16


async def test_concurrent_requests_are_spread_over_workers_and_freed() -> None:
    async with program(uniform_fleet(replicas=4)) as here, KvRouter(here.endpoint, BLOCK) as router:

        async def ask(n: int) -> int:
            return len(await tokens_of(await router.generate(prompt(first=n))))

        assert await asyncio.gather(*(ask(n) for n in range(32))) == [16] * 32
        assert all(
            blocks
            for blocks in (reported_by(here.fleet.workers[WorkerId(n)], DpRank(0)) for n in (1, 2, 3, 4))
        )
        assert set((await loads(router, prompt(first=99).tolist())).values()) == {(100, 7)}

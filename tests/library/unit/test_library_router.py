"""KvRouter and KvIndexer inside a program: what they refuse, and that nothing is left behind."""

import asyncio
from array import array
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypedDict

import pytest
from msgspec.structs import replace

from kvrouter.app.mock_fleet import MockFleet
from kvrouter.core.constraints import RoutingConstraints
from kvrouter.core.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    ModelNotReady,
    NoEligibleWorker,
    Reason,
    ShuttingDown,
)
from kvrouter.core.ids import Taint
from kvrouter.core.workers import Role, WorkerCard
from kvrouter.library import KvIndexer, KvRouter, Runtime
from kvrouter.settings.router_settings import KvRouterConfig
from tests.testing.log_events import event_of
from tests.testing.mock_fleet import BLOCK, LONG_TOKENS, uniform_fleet
from tests.testing.router_harness import ScriptedDiscovery, ScriptedEvents, card
from tests.testing.scripted_transport import ScriptedTransport
from tests.testing.waits import until

PROMPT = list(range(256, 256 + 100))
LONG: Mapping[str, object] = {"max_tokens": LONG_TOKENS, "ignore_eos": True}
NAN, INF = float("nan"), float("inf")


@dataclass(frozen=True, slots=True)
class InProgram:
    fleet: MockFleet
    router: KvRouter

    async def loads(self) -> list[int]:
        """What is booked, rank by rank, seen through a prompt that nobody has."""
        loads = await self.router.get_potential_loads([5] * BLOCK)
        return [
            load["potential_prefill_tokens"] - BLOCK + load["potential_decode_blocks"] - 1 for load in loads
        ]

    async def until_quiet(self) -> None:
        await until(lambda: self.fleet.cluster.idle)
        assert self.fleet.check_integrity() == []
        assert await self.loads() == [0, 0]


@asynccontextmanager
async def in_program(config: KvRouterConfig | None = None) -> AsyncIterator[InProgram]:
    async with MockFleet(uniform_fleet()) as fleet:
        runtime = Runtime(fleet.discovery, fleet.requests, fleet.events)
        endpoint = runtime.namespace("default").component("backend").endpoint("generate")
        async with KvRouter(endpoint, BLOCK, config) as router:
            yield InProgram(fleet, router)


class Scripted:
    """A router before workers that never answer."""

    def __init__(
        self, *cards: WorkerCard, block_size: int | None = 16, config: KvRouterConfig | None = None
    ) -> None:
        self.plane, self.discovery = ScriptedTransport(), ScriptedDiscovery()
        self.discovery.put(*(cards or (card(1), card(2))))
        runtime = Runtime(self.discovery, self.plane, ScriptedEvents())
        self.endpoint = runtime.namespace("default").component("backend").endpoint("generate")
        self.router = KvRouter(self.endpoint, block_size, config)


# Leaving


@pytest.mark.parametrize("close", [True, False])
async def test_leaving_an_answer_early_leaves_nothing_running(close: bool) -> None:
    """Also one who only breaks: the loop closes a generator that nobody holds any more."""
    async with in_program() as program:
        answers = await program.router.generate(PROMPT, stop_conditions=LONG, request_id="leaves")
        async for piece in answers:
            assert piece["token_ids"]
            break
        if close:
            await answers.aclose()
        del answers
        await program.until_quiet()


async def test_an_unread_answer_is_never_routed() -> None:
    async with in_program() as program:
        answers = await program.router.generate(PROMPT, stop_conditions=LONG, request_id="unread")
        assert await program.loads() == [0, 0]
        await answers.aclose()
        await program.until_quiet()


async def test_routing_errors_are_raised_at_the_first_read() -> None:
    async with in_program() as program:
        answers = await program.router.generate(PROMPT, worker_id=99)
        with pytest.raises(NoEligibleWorker) as refused:
            await anext(answers)
        assert refused.value.refusals == {Reason.PINNED_ELSEWHERE: 2}
        assert [piece async for piece in answers] == []
        await program.until_quiet()


# One id at a time


async def test_a_request_id_in_use_is_refused() -> None:
    async with in_program() as program:
        router = program.router
        first = await router.generate(PROMPT, stop_conditions=LONG, request_id="twice")
        early = await router.generate(PROMPT, request_id="twice")  # neither runs yet
        await anext(first)
        for again in (
            router.generate(PROMPT, request_id="twice"),
            router.best_worker(PROMPT, request_id="twice"),
        ):
            with pytest.raises(InvalidRequest, match="runs already") as refused:
                await again
            assert refused.value.param == "request_id"
        with pytest.raises(InvalidRequest, match="runs already"):
            await anext(early)
        await anext(first)  # and is undisturbed
        await first.aclose()
        worker_id, _, _ = await router.best_worker(PROMPT, request_id="twice")
        assert worker_id in {1, 2}
        await router.free("twice")
        await program.until_quiet()


async def test_a_request_id_is_reusable_once_its_answer_is_closed() -> None:
    async with in_program() as program:
        for _ in range(2):
            answers = await program.router.generate(
                PROMPT, worker_id=1, stop_conditions=LONG, request_id="again"
            )
            await anext(answers)
            await answers.aclose()
        await program.until_quiet()


async def test_a_booked_request_id_is_in_use_until_freed() -> None:
    async with in_program() as program:
        router = program.router
        await router.best_worker(PROMPT, request_id="hand")
        for again in (
            router.generate(PROMPT, request_id="hand"),
            router.best_worker(PROMPT, request_id="hand"),
        ):
            with pytest.raises(InvalidRequest, match="free it first") as refused:
                await again
            assert refused.value.param == "request_id"
        await router.mark_prefill_complete("hand")
        await router.free("hand")
        with pytest.raises(InvalidRequest, match="is not booked"):
            await router.free("hand")
        tokens = [piece async for piece in await router.generate(PROMPT, request_id="hand")]
        assert tokens
        await program.until_quiet()


async def test_concurrent_bookings_of_one_id_make_only_one() -> None:
    async with in_program() as program:
        booked = await asyncio.gather(
            *(program.router.best_worker(PROMPT, request_id="once") for _ in range(3)), return_exceptions=True
        )
        assert [isinstance(each, InvalidRequest) for each in booked] == [False, True, True]
        await program.router.free("once")
        await program.until_quiet()


async def test_a_refused_booking_leaves_its_request_id_free() -> None:
    scripted = Scripted(config=KvRouterConfig(active_prefill_tokens_threshold=50))
    async with scripted.router as router:
        for n in range(2):
            await router.best_worker(PROMPT, request_id=f"fills-{n}")
        for _ in range(2):
            with pytest.raises(Exception, match="busy"):
                await router.best_worker(PROMPT, request_id="late")
        await router.free("fills-0")
        await router.best_worker(PROMPT, request_id="late")


# After close


async def test_a_closed_router_raises_and_routes_nothing() -> None:
    async with in_program() as program:
        router = program.router
        unread = await router.generate(PROMPT)
        await router.best_worker(PROMPT, request_id="held")
        router.close()
        for refused in (
            router.generate(PROMPT),
            router.best_worker(PROMPT),
            router.best_worker(PROMPT, request_id="new"),
            router.get_potential_loads(PROMPT),
            router.dump_events(),
            anext(unread),
        ):
            with pytest.raises(ShuttingDown, match="closed"):
                await refused
        with pytest.raises(InvalidRequest, match="is not booked"):
            await router.free("held")
        router.close()
        assert program.fleet.cluster.idle


async def test_a_booking_waiting_while_the_router_closes_is_refused() -> None:
    config = KvRouterConfig(active_prefill_tokens_threshold=50, admission_queue_max=8, admission_wait_s=20.0)
    scripted = Scripted(config=config)
    async with scripted.router as router:
        for n in range(2):
            await router.best_worker(PROMPT, request_id=f"fills-{n}")
        waits = asyncio.ensure_future(router.best_worker(PROMPT, request_id="waits"))
        await asyncio.sleep(0)
        router.close()  # frees what was booked, so that there is room
        with pytest.raises(ShuttingDown, match="closed"):
            await waits
        with pytest.raises(InvalidRequest, match="is not booked"):
            await router.free("waits")


async def test_an_indexer_answers_only_inside_its_context() -> None:
    async with in_program() as program:
        async for _ in await program.router.generate(PROMPT, stop_conditions={"max_tokens": 1}):
            pass
        indexer = KvIndexer(Scripted().endpoint, BLOCK)
        with pytest.raises(ShuttingDown, match="async with"):
            await indexer.find_matches_for_request(PROMPT)
        async with indexer:
            assert await indexer.find_matches_for_request(PROMPT) == {}
        with pytest.raises(ShuttingDown, match="async with"):
            await indexer.find_matches_for_request(PROMPT)


# What is let in


class Wrong(TypedDict, total=False):
    stop_conditions: Mapping[str, object]
    sampling_options: Mapping[str, object]
    router_config_override: Mapping[str, object]
    worker_id: int
    dp_rank: int
    routing_constraints: RoutingConstraints
    request_id: str


def preferring(weight: float) -> RoutingConstraints:
    return RoutingConstraints(preferred_taints={Taint("gpu"): weight})


def requiring(*taints: str) -> RoutingConstraints:
    return RoutingConstraints(required_taints=frozenset(map(Taint, taints)))


WRONG_NUMBERS: list[tuple[Wrong, str]] = [
    ({"router_config_override": {field: value}}, f"router_config_override.{field}")
    for field in ("overlap_score_weight", "router_temperature")
    for value in (NAN, INF, -INF, -0.5, "1")
]
WRONG_WEIGHTS: list[tuple[Wrong, str]] = [
    ({"routing_constraints": preferring(weight)}, "routing_constraints.preferred_taints.gpu")
    for weight in (NAN, INF, -INF)
]
REFUSED: list[tuple[Wrong, str]] = [
    ({"router_config_override": {"router_mode": "kvv"}}, "router_config_override.router_mode"),
    ({"router_config_override": {"overlap": 1.0}}, "router_config_override"),
    ({"sampling_options": {"temperature": NAN}}, "sampling_options.temperature"),
    ({"sampling_options": {"temperature": -0.1}}, "sampling_options.temperature"),
    ({"sampling_options": {"temperature": INF}}, "sampling_options.temperature"),
    ({"sampling_options": {"top_p": 1.5}}, "sampling_options.top_p"),
    ({"sampling_options": {"repetition_penalty": INF}}, "sampling_options.repetition_penalty"),
    ({"sampling_options": {"temprature": 0.0}}, "sampling_options"),
    ({"stop_conditions": {"max_tokens": 0}}, "stop_conditions.max_tokens"),
    ({"stop_conditions": {"max_tokens": 2, "min_tokens": 3}}, "stop_conditions.min_tokens"),
    ({"stop_conditions": {"stop_token_ids": [-1]}}, "stop_conditions.stop_token_ids[0]"),
    ({"stop_conditions": {"stop_token_ids": list(range(65))}}, "stop_conditions.stop_token_ids"),
    ({"stop_conditions": {"max_tokens": 4000}}, "stop_conditions.max_tokens"),
    ({"dp_rank": 0}, "dp_rank"),
    ({"worker_id": -1}, "worker_id"),
    ({"worker_id": 1, "dp_rank": -1}, "dp_rank"),
    ({"routing_constraints": requiring("")}, "routing_constraints.required_taints"),
    (
        {"routing_constraints": requiring("dynamo.topology/zone=a", "dynamo.topology/zone=b")},
        "routing_constraints.required_taints",
    ),
    ({"request_id": ""}, "request_id"),
    ({"request_id": "x" * 129}, "request_id"),
]


@pytest.mark.parametrize(("wrong", "param"), [*WRONG_NUMBERS, *WRONG_WEIGHTS, *REFUSED])
async def test_invalid_arguments_name_their_field_and_send_nothing(wrong: Wrong, param: str) -> None:
    scripted = Scripted()
    async with scripted.router as router:
        with pytest.raises(InvalidRequest) as refused:
            await router.generate(PROMPT, **wrong)
        assert refused.value.param == param
        assert refused.value.message.startswith(f"{param}: ")
        assert scripted.plane.opened == []


@pytest.mark.parametrize("override", [{"overlap_score_weight": NAN}, {"router_temperature": -1.0}])
async def test_best_worker_refuses_the_overrides_that_requests_refuse(override: Mapping[str, object]) -> None:
    async with Scripted().router as router:
        for request_id in (None, "booked"):
            with pytest.raises(InvalidRequest):
                await router.best_worker(PROMPT, router_config_override=override, request_id=request_id)


@pytest.mark.parametrize("request_id", ["", "x" * 129, "two words", "line\nforged", "ümlaut", "a%2Fb"])
async def test_invalid_request_ids_are_refused(request_id: str) -> None:
    async with Scripted().router as router:
        for refused in (
            router.generate(PROMPT, request_id=request_id),
            router.best_worker(PROMPT, request_id=request_id),
        ):
            with pytest.raises(InvalidRequest) as error:
                await refused
            assert error.value.param == "request_id"
        await router.best_worker(PROMPT, request_id="a.b_c:d@e/f-" + "9" * 116)


@pytest.mark.parametrize(
    "token_ids", [[], array("I"), array("q"), [-1], [2**32], array("q", [-1]), [1.5], ["a"], b"\1\0\0\0"]
)
async def test_invalid_token_ids_are_refused_by_every_method(token_ids: list[int]) -> None:
    scripted = Scripted()
    async with scripted.router as router, KvIndexer(scripted.endpoint, 16) as indexer:
        for refused in (
            router.generate(token_ids),
            router.best_worker(token_ids),
            router.get_potential_loads(token_ids),
            indexer.find_matches_for_request(token_ids),
        ):
            with pytest.raises(InvalidRequest) as error:
                await refused
            assert error.value.param == "token_ids"


async def test_a_prompt_that_fills_the_context_is_refused() -> None:
    async with Scripted().router as router:
        for refused in (router.generate([7] * 4096), router.best_worker([7] * 4096)):
            with pytest.raises(ContextLengthExceeded) as error:
                await refused
            assert error.value.param == "token_ids"
        await router.best_worker([7] * 4095)
        await router.generate([7] * 4080, stop_conditions={"max_tokens": 16})


async def test_requests_go_only_to_workers_with_enough_context() -> None:
    small = replace(card(2), context_length=64)
    async with Scripted(card(1), small).router as router:
        for _ in range(4):
            worker_id, _, _ = await router.best_worker(PROMPT)
            assert worker_id == 1
        with pytest.raises(ContextLengthExceeded):
            await router.generate(PROMPT, worker_id=2)
        await router.generate(PROMPT, worker_id=1)
    sender = replace(card(3, Role.PREFILL), context_length=8)
    async with Scripted(card(1), sender).router as router:
        with pytest.raises(NoEligibleWorker) as refused:
            await router.best_worker(PROMPT)
        assert refused.value.refusals == {Reason.CONTEXT_TOO_SHORT: 1}


async def test_a_worker_with_another_block_size_is_refused_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with Scripted(replace(card(1), block_size=32), card(2)).router as router:
        for n in range(4):
            worker_id, _, _ = await router.best_worker(PROMPT, request_id=f"r{n}")
            assert worker_id == 2
    refused = [record for record in caplog.records if record.name == "kvrouter.library.endpoint_workers"]
    assert [(record.levelname, event_of(record)) for record in refused] == [("ERROR", "worker_refused")]


# Why nobody is there


WRONG_SIZE = "worker 1 was refused: block_size: must be 16, as this router's, not 32"


@pytest.mark.parametrize("model", [None, "mock"])
async def test_the_errors_of_every_method_say_which_block_size_workers_were_refused_for(
    model: str | None,
) -> None:
    scripted = Scripted(replace(card(1), block_size=32), replace(card(2), block_size=None))
    async with scripted.router as router, KvIndexer(scripted.endpoint, 16) as indexer:
        for call in (
            router.generate(PROMPT, model),
            router.best_worker(PROMPT, model=model),
            router.best_workers(PROMPT, request_id="booked", model=model),
            router.get_potential_loads(PROMPT, model=model),
            indexer.find_matches_for_request(PROMPT, model=model),
        ):
            with pytest.raises(NoEligibleWorker) as refused:
                await call
            assert refused.value.param == "block_size"
            assert str(refused.value) == refused.value.message
            assert refused.value.message == (
                f"no worker serves this endpoint; {WRONG_SIZE}; "
                "worker 2 was refused: block_size: must be 16, as this router's, not unknown"
            )
        with pytest.raises(ModelNotReady, match=r"'other' is served here is not known yet.*block_size"):
            await router.best_worker(PROMPT, model="other")


async def test_a_request_pinned_to_a_refused_worker_is_told_why() -> None:
    async with Scripted(replace(card(1), block_size=32), card(2)).router as router:
        answer = await router.generate(PROMPT, worker_id=1)
        with pytest.raises(NoEligibleWorker) as refused:
            await anext(answer)
        assert refused.value.refusals == {Reason.PINNED_ELSEWHERE: 1}
        assert refused.value.message.endswith(f"; {WRONG_SIZE}")


async def test_a_missing_prefill_partner_is_explained_by_its_block_size() -> None:
    decode = replace(card(2, Role.DECODE), decode_only=True)
    async with Scripted(replace(card(1, Role.PREFILL), block_size=32), decode).router as router:
        for request_id in (None, "booked"):
            with pytest.raises(NoEligibleWorker) as refused:
                await router.best_worker(PROMPT, request_id=request_id)
            assert refused.value.message.endswith(f"; {WRONG_SIZE}")


async def test_a_worker_that_left_or_came_back_with_the_right_size_is_named_no_more() -> None:
    scripted = Scripted(replace(card(1), block_size=32), replace(card(2), block_size=32))
    async with scripted.router as router:
        scripted.discovery.drop(1)
        with pytest.raises(NoEligibleWorker, match="worker 2 was refused") as refused:
            await router.best_worker(PROMPT)
        assert "worker 1" not in refused.value.message
        scripted.discovery.put(card(2, incarnation=2))
        assert (await router.best_worker(PROMPT)).worker_id == 2
        with pytest.raises(NoEligibleWorker) as pinned:
            await anext(await router.generate(PROMPT, worker_id=1))
        assert "block_size" not in pinned.value.message


async def test_an_error_names_four_refused_workers_and_counts_the_rest() -> None:
    cards = [replace(card(n), block_size=32) for n in range(1, 8)]
    async with Scripted(*cards).router as router:
        with pytest.raises(NoEligibleWorker) as refused:
            await router.best_worker(PROMPT)
        assert refused.value.message.count("was refused") == 4
        assert refused.value.message.endswith("; and 3 more")


async def test_without_a_block_size_the_workers_own_counts() -> None:
    other = [replace(card(n), block_size=32) for n in (1, 2)]
    scripted = Scripted(*other, block_size=None)
    async with scripted.router as router, KvIndexer(scripted.endpoint) as indexer:
        loads = await router.get_potential_loads(PROMPT)
        assert [load["potential_decode_blocks"] for load in loads] == [4, 4]  # of 32 tokens
        assert await indexer.find_matches_for_request(PROMPT) == {}
        scripted.discovery.put(card(3))
        answer = await router.generate(PROMPT, worker_id=3)
        with pytest.raises(NoEligibleWorker, match=r"worker 3 was refused: .*16"):
            await anext(answer)

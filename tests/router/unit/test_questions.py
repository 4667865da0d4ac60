"""Questions draw for themselves: whoever only asks where to send does not herd, and changes no request."""

from collections import Counter
from math import exp

import pytest

from kvrouter import KvRouter, KvRouterConfig
from kvrouter.core.constraints import RouterMode
from kvrouter.core.ids import LeaseKey, RequestId, RouterId
from kvrouter.fleetfile.routing_settings import routing_settings
from kvrouter.kernel.fleet.fleet import Fleet
from kvrouter.kernel.ledger.port import NativeLedger
from kvrouter.kernel.placement.cache_view import NoCacheView
from kvrouter.router.instrumentation import ModelInstrumentation
from kvrouter.router.model_router import DecisionLog, ModelRouter
from kvrouter.telemetry import Telemetry
from tests.testing.embedding_program import program
from tests.testing.mock_fleet import BLOCK, prompt, uniform_fleet
from tests.testing.router_harness import BLOCK_SIZE, MODEL, card, generate_request

N = 400


def room(config: KvRouterConfig, *, workers: int = 2, seed: int = 7) -> ModelRouter:
    """A model's router before idle workers."""
    fleet = Fleet(MODEL, BLOCK_SIZE)
    for number in range(1, workers + 1):
        fleet.join(card(number))
    return ModelRouter(
        fleet=fleet,
        cache=NoCacheView(),
        ledger=NativeLedger(),
        router_id=RouterId("here"),
        config=config,
        settings=routing_settings(config, None),
        decisions=DecisionLog(requests_max=1),
        instrumentation=ModelInstrumentation(Telemetry(), MODEL),
        seed=seed,
    )


def load(router: ModelRouter, worker_id: int) -> None:
    """Let one worker be the dearer one."""
    prompt_ = router.hash_prompt(generate_request(tokens=320).token_ids)
    router.ledger.book(
        key=LeaseKey(RouterId("other"), RequestId("load"), 0),
        slot=router.fleet.slots_of(card(worker_id).worker_id)[0],
        prompt=prompt_,
        prefill_tokens=0,
    )


def asked(router: ModelRouter, n: int = N) -> list[int]:
    """Where so many questions were sent."""
    return [
        router.explain(generate_request(request_id=f"q{number}")).decode.rank.worker_id for number in range(n)
    ]


async def booked(router: ModelRouter, n: int) -> list[int]:
    """Where so many requests went, one after the other."""
    went: list[int] = []
    for number in range(n):
        request = generate_request(request_id=f"r{number}")
        placement = await router.place(request, request.token_ids, attempt=0, excluded=frozenset())
        router.release(placement)
        went.append(placement.decision.decode.rank.worker_id)
    return went


def test_questions_at_temperature_1_are_drawn_by_cost() -> None:
    router = room(KvRouterConfig(router_temperature=1.0))
    load(router, 1)
    share = 1 / (1 + exp(1.0))
    dear = asked(router).count(1)
    assert abs(dear - share * N) < 4 * (share * (1 - share) * N) ** 0.5


def test_questions_follow_round_robin_and_random_modes() -> None:
    in_turn = asked(room(KvRouterConfig(router_mode=RouterMode.ROUND_ROBIN), workers=4))
    assert in_turn == [1, 2, 3, 4] * (N // 4)
    by_chance = Counter(asked(room(KvRouterConfig(router_mode=RouterMode.RANDOM), workers=4)))
    assert sorted(by_chance) == [1, 2, 3, 4]
    assert min(by_chance.values()) > N / 8


@pytest.mark.parametrize("mode", RouterMode)
async def test_questions_and_bookings_do_not_change_each_other(mode: RouterMode) -> None:
    config = KvRouterConfig(router_mode=mode, router_temperature=1.0)
    plain, asked_between, again = (room(config, workers=5) for _ in range(3))
    expected = await booked(plain, 50)
    assert len(set(expected)) == 5
    reported = asked(asked_between, 33)
    assert await booked(asked_between, 50) == expected
    await booked(again, 20)
    assert asked(again, 33) == reported, "nor does a booking change a question"


async def test_best_worker_without_a_request_id_spreads_over_all_workers() -> None:
    config = KvRouterConfig(router_temperature=1.0)
    async with (
        program(uniform_fleet(replicas=3)) as here,
        KvRouter(here.endpoint, BLOCK, kv_router_config=config) as router,
    ):
        named = Counter([(await router.best_worker(prompt()))[0] for _ in range(90)])
    assert sorted(named) == [1, 2, 3]
    assert min(named.values()) > 3
